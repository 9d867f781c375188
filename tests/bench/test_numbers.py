"""What the benchmarks make of their times: turns, spread, ratios, tables. No test here looks at a clock."""

from __future__ import annotations

import io
import json
from itertools import combinations
from pathlib import Path

import pytest
from bench.contenders import ALL, BARE, SAME, SOME, Contender
from bench.measure import Spread, alternate, percentile, spread
from bench.table import Goal, Table, render, shown
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from bench import contenders, create, exhaustive, peers, rpc
from gpulet.errors import UsageError
from gpulet.plugin.partition import Partitioner

PEER = peers.Peers("/p/runtime", "/p/hook", "/p/ctk", "/p/cdi-hook", "/p/cli", "/p/plugin")


def test_spread_and_percentiles() -> None:
    assert spread([4.0]) == Spread(1, 4.0, 4.0, 4.0, 4.0)
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == Spread(5, 1.0, 2.0, 3.0, 4.0)
    hundred = [float(number) for number in range(1, 101)]
    assert [percentile(hundred, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 99) == 7.0


def test_contenders_take_turns_and_the_first_round_is_forgotten() -> None:
    calls: list[str] = []

    def contender(name: str):
        def act() -> float:
            calls.append(name)
            return float(len(calls))

        return act

    told = alternate({name: contender(name) for name in "abc"}, 3)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert told == {"a": [4.0, 9.0, 11.0], "b": [5.0, 7.0, 12.0], "c": [6.0, 8.0, 10.0]}


def flat(milliseconds: float) -> Spread:
    return Spread(9, milliseconds - 2, milliseconds - 1, milliseconds, milliseconds + 1)


def test_the_ratio_is_of_added_times_within_a_mode() -> None:
    taken = {
        BARE: flat(30),
        Contender("gpulet", "jit-cdi", "", ALL): flat(50),
        Contender("gpulet", "jit-cdi", "", SAME): flat(70),
        Contender("gpulet", "jit-cdi", "", SOME): flat(40),
        Contender("gpulet", "cdi", "YAML", ALL): flat(55),
        Contender("gpulet", "legacy", "", ALL): flat(90),
        Contender("peer", "jit-cdi", "", ALL): flat(130),
        Contender("peer", "cdi", "YAML", ALL): flat(80),
    }
    made = create.table(taken, ["a note"])
    ratio = {
        (row["runtime"], row["mode"], row["specification"], row["capabilities"]): row["of the peer's"]
        for row in made.rows
    }
    assert ratio["gpulet", "jit-cdi", "", ALL] == pytest.approx(0.2)
    assert ratio["gpulet", "jit-cdi", "", SOME] == pytest.approx(0.1)
    assert ratio["gpulet", "cdi", "YAML", ALL] == pytest.approx(0.5)
    assert ratio["gpulet", "legacy", "", ALL] is None
    assert ratio["bare", "", "", ""] is None
    assert {goal.text.split(":")[0]: goal.met for goal in made.goals} == {
        f"gpulet jit-cdi {SAME}": False,
        f"gpulet jit-cdi {SOME}": True,
    }
    assert made.notes == ["a note"]


def test_a_goal_that_cannot_be_judged_says_so() -> None:
    assert "not measured" in Goal("a", 1.0, None).line()
    assert Goal("a", 1.0, 1.0).line().endswith("met")
    assert Goal("a", 1.0, 1.1).line().endswith("MISSED")


def test_tables_print_and_turn_into_data() -> None:
    made = Table("g", "title [of] it", ("name", "ms"), goals=[Goal("ms", 2.0, 3.0)], notes=["a [note]"])
    made.add("one", 1.23456)
    made.add("two", None)
    out = io.StringIO()
    render([made], Console(file=out, width=80))
    text = out.getvalue()
    assert all(part in text for part in ("title [of] it", "one", "1.23", "MISSED", "a [note]"))
    data = json.loads(json.dumps(made.to_data()))
    assert data["rows"] == [{"name": "one", "ms": 1.23456}, {"name": "two", "ms": None}]
    assert data["goals"] == [{"text": "ms", "limit": 2.0, "seen": 3.0, "met": False}]
    with pytest.raises(ValueError):
        made.add("three")


@pytest.mark.parametrize(("cell", "text"), [(None, ""), (0.123, "0.12"), (12.34, "12.3"), (123.4, "123"), (7, "7")])
def test_cells_show_three_digits(cell: float | None, text: str) -> None:
    assert shown(cell) == text


def test_who_runs_depends_on_what_the_peer_has() -> None:
    def makers(named: peers.Peers) -> set[tuple[str, str]]:
        return {(one.maker, one.mode) for one in contenders.contenders(named)}

    ours = {("bare", ""), ("gpulet", "jit-cdi"), ("gpulet", "cdi"), ("gpulet", "legacy")}
    assert makers(peers.Peers()) == ours
    assert makers(PEER) == ours | {("peer", mode) for mode in ("jit-cdi", "cdi", "legacy")}
    assert makers(peers.Peers(runtime="/r", ctk="/c")) == ours | {("peer", "jit-cdi")}
    assert contenders.lacking(PEER) == []
    assert any("PEER_CDI_HOOK" in line for line in contenders.lacking(peers.Peers(runtime="/r", ctk="/c")))
    assert "PEER_RUNTIME" in contenders.lacking(peers.Peers())[0]


def test_peers_are_named_by_the_environment(tmp_path: Path) -> None:
    program = tmp_path / "a"
    program.write_text("")
    program.chmod(0o755)
    assert peers.from_environ({"PEER_CDI_HOOK": str(program)}) == peers.Peers(cdi_hook=str(program))
    with pytest.raises(UsageError, match="PEER_RUNTIME"):
        peers.from_environ({"PEER_RUNTIME": str(tmp_path / "missing")})


def test_goals_of_the_plugin_are_read_from_its_rows() -> None:
    made = Table("rpc", "", rpc.COLUMNS)
    for devices, milliseconds in ((8, 1.0), (8000, 3.0)):
        made.add("gpulet", devices, "Allocate 2", milliseconds, milliseconds, milliseconds, 1.1)
    seen = {goal.text: goal.seen for goal in rpc.goals(made)}
    assert seen["Allocate with 8 devices, of the peer's,"] == 1.1
    assert seen["Allocate with 8,000 devices, of that with 8,"] == 3.0
    assert seen["ms from the start to the registration"] is None


@pytest.mark.parametrize("number", range(1, 8))
def test_as_many_splits_as_counted(number: int) -> None:
    for size in range(1, number + 1):
        found = list(exhaustive.splits(range(number), size))
        assert len(found) == exhaustive.count(number, size)
        assert len({frozenset(map(frozenset, split)) for split in found}) == len(found)
        assert all(sorted(gpu for part in split for gpu in part) == list(range(number)) for split in found)


@given(st.integers(2, 6), st.data())
def test_exhaustive_search_and_ours_agree(number: int, data: st.DataObject) -> None:
    scores = [[0] * number for _ in range(number)]
    for a, b in combinations(range(number), 2):
        scores[a][b] = scores[b][a] = data.draw(st.sampled_from((10, 30, 50, 150)))
    size = data.draw(st.integers(1, number))
    chosen = Partitioner(scores).choose(range(number), (), size)
    assert exhaustive.best_with(scores, chosen, range(number), size) == exhaustive.best(scores, range(number), size)

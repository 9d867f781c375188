"""The loader cache: read, written, accepted by ldconfig and used by the real loader."""

from __future__ import annotations

import shutil
import struct
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulet.errors import NodeError
from gpulet.node import ldcache
from gpulet.node.ldcache import Cache, Entry

SYSTEM = Path("/etc/ld.so.cache")
NAMES = st.from_regex(r"lib[a-z]{1,4}([-_.+][0-9a-z]{1,3}){0,2}\.so(\.[0-9]{1,3}){0,3}", fullmatch=True)
ENTRIES = st.builds(
    Entry,
    NAMES,
    NAMES.map(lambda name: f"/usr/lib/{name}"),
    st.sampled_from(sorted(ldcache.FLAGS.values())),
    st.integers(0, 9),
    st.sampled_from([0, 0, 0, 1 << 62, (1 << 62) + 1]),
)
CACHES = st.builds(
    Cache, st.lists(ENTRIES, max_size=12).map(tuple), st.just(("x86-64-v3", "x86-64-v2")), st.text(max_size=9)
)


def loader_compares(one: str, two: str) -> int:
    """The comparison of glibc's dl-cache.c, spelt out: the model that our sort key is held against."""
    left, right = one.encode() + b"\0", two.encode() + b"\0"
    i = j = 0
    while left[i]:
        if chr(left[i]).isdigit():
            if not chr(right[j]).isdigit():
                return 1
            first = second = 0
            while chr(left[i]).isdigit():
                first, i = first * 10 + left[i] - 48, i + 1
            while chr(right[j]).isdigit():
                second, j = second * 10 + right[j] - 48, j + 1
            if first != second:
                return first - second
        elif chr(right[j]).isdigit():
            return -1
        elif left[i] != right[j]:
            return left[i] - right[j]
        else:
            i, j = i + 1, j + 1
    return left[i] - right[j]


def sign(number: int) -> int:
    return (number > 0) - (number < 0)


@given(NAMES, NAMES)
def test_names_are_ordered_as_the_loader_compares_them(one: str, two: str) -> None:
    left, right = ldcache.name_key(one), ldcache.name_key(two)
    assert sign(loader_compares(one, two)) == (left > right) - (left < right)


@given(CACHES)
def test_read_after_write_is_the_identity_up_to_order(cache: Cache) -> None:
    read = ldcache.parse(ldcache.write(cache))
    assert sorted(read.entries, key=repr) == sorted(cache.entries, key=repr)
    assert (read.hwcaps, read.generator) == (cache.hwcaps, cache.generator)
    assert ldcache.parse(ldcache.write(read)) == read
    for one, two in pairwise(read.entries):
        assert loader_compares(one.name, two.name) >= 0


@given(CACHES, st.lists(ENTRIES.map(lambda entry: entry.replace(hwcap=0)), min_size=1, max_size=4))
def test_merged_entries_win_and_merging_twice_changes_nothing(cache: Cache, entries: list[Entry]) -> None:
    merged = ldcache.merge(ldcache.write(cache), entries)
    assert ldcache.merge(merged, entries) == merged
    first = entries[0]
    assert ldcache.parse(merged).find(first.name, first.flags) == first.path
    assert set(ldcache.parse(merged).entries) == {*cache.entries, *entries}


@given(CACHES, st.lists(ENTRIES, max_size=6))
def test_new_rows_among_the_old_are_as_good_as_all_put_in_order(cache: Cache, entries: list[Entry]) -> None:
    data, new = ldcache.write(cache), tuple(dict.fromkeys(entries))
    assert ldcache._merge_rows(data, new)
    assert ldcache.parse(ldcache.merge(data, new)) == ldcache.parse(ldcache.merge_anew(data, new))


def test_the_systems_own_cache_is_merged_row_by_row() -> None:
    """And with the old table in front of it, which images of before 2020 have."""
    data = SYSTEM.read_bytes()
    new = [Entry("libcuda.so.1", "/x/libcuda.so.1"), Entry("libc.so.6", "/x/libc.so.6"), ldcache.parse(data).entries[7]]
    assert ldcache._merge_rows(data, new)
    assert ldcache.parse(ldcache.merge(data, new)) == ldcache.parse(ldcache.merge_anew(data, new))
    old = ldcache.OLD_MAGIC + struct.pack("<I", 1) + bytes(12)
    assert ldcache.merge(old + bytes(-len(old) % 8) + data, new) == ldcache.merge(data, new)


def test_a_cache_in_no_order_is_put_in_order() -> None:
    """By `merge_anew` alone; as it is, the loader would find nothing in it either."""
    data = ldcache.write(Cache(tuple(Entry(f"lib{letter}.so.1", f"/{letter}") for letter in "abcdef")))
    start = 48
    rows = [data[at : at + 24] for at in range(start, start + 6 * 24, 24)]
    shuffled = data[:start] + b"".join(reversed(rows)) + data[start + 6 * 24 :]
    new = [Entry("libc.so.1", "/c"), Entry("libz.so.1", "/z")]
    assert ldcache.parse(ldcache.merge_anew(shuffled, new)) == ldcache.parse(ldcache.merge(data, new))
    assert set(ldcache.parse(ldcache.merge(shuffled, new)).entries) >= {*ldcache.parse(data).entries, new[1]}


@pytest.mark.parametrize("place", [0, 47, 1 << 30])
def test_a_string_outside_the_strings_is_no_reason_to_move_it(place: int) -> None:
    data = bytearray(ldcache.write(Cache((Entry("liba.so.1", "/a"),))))
    struct.pack_into("<I", data, 48 + 4, place)
    assert ldcache._merge_rows(bytes(data), [Entry("libb.so.1", "/b")]) == b""


@given(st.binary(max_size=200))
def test_garbage_is_refused_cleanly(data: bytes) -> None:
    for text in (data, ldcache.MAGIC + data, ldcache.OLD_MAGIC + data):
        try:
            ldcache.parse(text)
            ldcache.merge(text, [Entry("libb.so.1", "/b")])
        except NodeError as error:
            assert "ldconfig" in str(error)


@settings(max_examples=50)
@given(st.data())
def test_a_truncated_cache_is_never_read_beyond_its_end(data: st.DataObject) -> None:
    whole = ldcache.write(Cache((Entry("liba.so.1", "/liba.so.1"), Entry("libb.so.1", "/libb.so.1"))))
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    try:
        assert len(ldcache.parse(cut).entries) == 2
    except NodeError:
        pass


def test_old_and_new_format_in_one_file() -> None:
    new = ldcache.write(Cache((Entry("liba.so.1", "/lib/liba.so.1"),)))
    old = ldcache.OLD_MAGIC + struct.pack("<I", 1) + struct.pack("<iII", 3, 0, 0)
    both = old + b"\0" * (-len(old) % 8) + new
    assert ldcache.parse(both).find("liba.so.1") == "/lib/liba.so.1"


def test_the_old_format_alone() -> None:
    strings = b"liba.so.1\0/lib/liba.so.1\0"
    data = ldcache.OLD_MAGIC + struct.pack("<I", 1) + struct.pack("<iII", 3, 0, 10) + strings
    assert ldcache.parse(data).entries == (Entry("liba.so.1", "/lib/liba.so.1", 3),)


@pytest.mark.skipif(not SYSTEM.exists(), reason="no loader cache on this machine")
def test_the_systems_own_cache_survives_and_ldconfig_lists_what_was_put_in(tmp_path: Path) -> None:
    before = ldcache.parse(SYSTEM.read_bytes())
    assert ldcache.parse(ldcache.write(before)) == before  # ours is ldconfig's order
    target = tmp_path / "cache"
    target.write_bytes(
        ldcache.merge(SYSTEM.read_bytes(), [Entry("libgpulet-test.so.1", "/usr/lib/x/libgpulet-test.so.1")])
    )
    ldconfig = shutil.which("ldconfig", path="/usr/sbin:/sbin")
    assert ldconfig
    said = subprocess.run([ldconfig, "-p", "-C", target], capture_output=True, text=True, check=True).stdout
    assert "libgpulet-test.so.1 (libc6,x86-64) => /usr/lib/x/libgpulet-test.so.1" in said
    assert said.count("=>") == len(before.entries) + 1


@pytest.mark.root
@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler")
def test_the_real_loader_finds_a_library_through_a_merged_cache(tmp_path: Path) -> None:
    """In a root file system of its own: the library lies where only the cache can tell."""
    root = tmp_path / "root"
    (root / "opt/hidden").mkdir(parents=True)
    (root / "etc").mkdir()
    source, library, program = tmp_path / "lib.c", root / "opt/hidden/libfar.so.1", root / "probe"
    source.write_text("int far_answer(void) { return 42; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-Wl,-soname,libfar.so.1", "-o", library, source], check=True)
    main = tmp_path / "main.c"
    main.write_text("int far_answer(void); int main(void) { return far_answer() == 42 ? 0 : 9; }\n")
    subprocess.run(["cc", "-o", program, main, library], check=True)
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    for word in [word for word in listed.split() if word.startswith("/") and "libfar" not in word]:
        target = root / word.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(word, target)
    without = subprocess.run(["chroot", root, "/probe"], capture_output=True, text=True)
    assert without.returncode == 127 and "libfar.so.1" in without.stderr
    (root / "etc/ld.so.cache").write_bytes(ldcache.merge(None, [Entry("libfar.so.1", "/opt/hidden/libfar.so.1")]))
    assert subprocess.run(["chroot", root, "/probe"]).returncode == 0


def bomb(entries: int, text: bytes, at: int = 0) -> bytes:
    """A cache whose entries all share one string."""
    start = 48 + 24 * entries
    header = struct.pack("<20sIIB3xI12x", ldcache.MAGIC, entries, len(text), 2, 0)
    return header + struct.pack("<iIIIQ", 0x0303, start + at, start, 0, 0) * entries + text + b"\0"


@pytest.mark.parametrize(
    "data",
    [
        bomb(100_000, b"a"),  # more than any machine has
        bomb(60_000, b"x" * 4000),  # 480 MB out of 1.4 MB
        bomb(1, b"x" * 100_000),
    ],
)
def test_an_images_cache_does_not_grow_here(data: bytes) -> None:
    with pytest.raises(NodeError, match="damaged"):
        ldcache.parse(data)
    with pytest.raises(NodeError, match="damaged"):
        ldcache.merge(data, [Entry("libb.so.1", "/b")])


def test_a_name_of_many_digits_takes_no_time() -> None:
    assert ldcache.name_key("9" * 5_000_000) == (256 + int("9" * 256),)

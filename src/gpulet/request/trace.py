"""What was looked at on the way to a decision: one Rule each, in order. Loaded by the programs in launch/."""

from __future__ import annotations

from gpulet.value import Value


class Rule(Value):
    """One rule. name: which; input: the value it saw; where: where that came from ("process.env[3]",
    "config.toml line 7", "mount ...", "ledger ..."); outcome: what followed, in words; level: "info", or "warning"
    where an engine's log should say it.
    """

    name: str
    input: str
    where: str
    outcome: str
    level: str = "info"


class Trace:
    """Collects rules while a decision is made."""

    def __init__(self) -> None:
        self._rules: list[Rule] = []

    def note(self, name: str, value: object, where: str, outcome: str) -> None:
        """Records a rule that was looked at."""
        self._rules.append(Rule(name, str(value), where, outcome))

    def warn(self, name: str, value: object, where: str, outcome: str) -> None:
        """Records a rule whose outcome may surprise, so that logs say it too."""
        self._rules.append(Rule(name, str(value), where, outcome, "warning"))

    def extend(self, other: Trace) -> None:
        """Takes over another trace's rules."""
        self._rules += other._rules

    def rules(self) -> tuple[Rule, ...]:
        """The rules so far, in the order in which they were looked at."""
        return tuple(self._rules)

"""Command lines as GNU argp reads them: abbreviations, bundled short options, optional arguments, its words for errors.

Written by hand, as argparse costs 20 ms and reads otherwise. Reference: the GNU C library manual, "Parsing Program
Options with Argp" and "Parsing Long Options with getopt_long". Exit status is 1, as NVIDIA's program sets it.
"""

from __future__ import annotations

from gpulet.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

NONE, REQUIRED, OPTIONAL = "none", "required", "optional"
WIDTH = 79  # argp's right margin


class Option:
    """One option: long name, short letter or "", whether it takes an argument, and what help says of it."""

    def __init__(self, long: str, short: str = "", argument: str = NONE, help: str = "", value: str = "") -> None:
        self.long = long
        self.short = short
        self.argument = argument
        self.help = help
        self.value = value or "ARG"


STANDARD = (
    Option("help", "?", help="Give this help list"),
    Option("usage", "", help="Give a short usage message"),
    Option("version", "V", help="Print program version"),
)


class Wrong(UsageError):
    """A command line that can't be read: the program's name and message, and where to find help."""

    exit_code = 1

    def __init__(self, program: str, message: str) -> None:
        super().__init__(message)
        self.program = program
        self.message = message

    def __str__(self) -> str:
        first = self.message if self.message.startswith("Usage: ") else f"{self.program}: {self.message}"
        hint = f"Try `{self.program} --help' or `{self.program} --usage' for more information."
        return f"{first}\n{_wrapped(hint)}"


def parse(
    program: str, arguments: Sequence[str], options: Sequence[Option], *, in_order: bool = False
) -> tuple[list[tuple[str, str | None]], list[str]]:
    """(options as (long name, value) in the order given, the other words).

    in_order: stop at the first word that is no option; it and all that follow are the other words. Raises Wrong.
    """
    every = (*options, *STANDARD)
    found: list[tuple[str, str | None]] = []
    words: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            words += rest
            break
        if argument.startswith("--"):
            found.append(_long(program, argument[2:], every, rest))
        elif argument.startswith("-") and argument != "-":
            found += _short(program, argument[1:], every, rest)
        else:
            words.append(argument)
            if in_order:
                words += rest
                break
    return found, words


def _long(program: str, text: str, options: Sequence[Option], rest: list[str]) -> tuple[str, str | None]:
    name, equals, value = text.partition("=")
    option = _named(program, name, options)
    if option.argument == NONE and equals:
        raise Wrong(program, f"option '--{option.long}' doesn't allow an argument")
    if option.argument == REQUIRED and not equals:
        if not rest:
            raise Wrong(program, f"option '--{option.long}' requires an argument")
        return option.long, rest.pop(0)
    return option.long, value if equals else None


def _named(program: str, name: str, options: Sequence[Option]) -> Option:
    fitting = [option for option in options if option.long.startswith(name)]
    exact = [option for option in fitting if option.long == name]
    if len(exact or fitting) == 1:
        return (exact or fitting)[0]
    if not fitting:
        raise Wrong(program, f"unrecognized option '--{name}'")
    possible = " ".join(f"'--{option.long}'" for option in fitting)
    raise Wrong(program, f"option '--{name}' is ambiguous; possibilities: {possible}")


def _short(program: str, letters: str, options: Sequence[Option], rest: list[str]) -> Iterator[tuple[str, str | None]]:
    while letters:
        letter, letters = letters[0], letters[1:]
        option = next((option for option in options if option.short == letter), None)
        if option is None:
            raise Wrong(program, f"invalid option -- '{letter}'")
        if option.argument == NONE:
            yield option.long, None
            continue
        if option.argument == REQUIRED and not letters:
            if not rest:
                raise Wrong(program, f"option requires an argument -- '{letter}'")
            letters = rest.pop(0)
        yield option.long, letters or None
        return


def usage(program: str, tail: str) -> str:
    """The line that says how to call the program."""
    return f"Usage: {program} [OPTION...] {tail}".rstrip()


def help_text(program: str, tail: str, about: str, options: Sequence[Option]) -> str:
    """What --help prints."""
    lines = [usage(program, tail), about, ""]
    for option in (*options, *STANDARD):
        value = {NONE: "", REQUIRED: f"={option.value}", OPTIONAL: f"[={option.value}]"}[option.argument]
        left = f"  {f'-{option.short}, ' if option.short else '    '}--{option.long}{value}"
        lines.append(f"{left:<36} {option.help}" if len(left) < 36 else f"{left}\n{'':<37}{option.help}")
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> str:
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)

"""The launchers: small executables that start the programs in `launch/` in milliseconds.

A console script loads `site` and, through it, whatever the environment's .pth files name. A launcher starts the
interpreter isolated (`-I`: no PYTHON* variables, no folder of the caller's on the path), without `site` (`-S`) and
without asking the C library about the caller's language (`-X utf8`), so a container's environment can't change what
runs, and start-up costs what the program itself imports. A program that lives for milliseconds gains 3 of them by
neither collecting garbage nor taking itself apart at the end.
"""

from __future__ import annotations

import compileall
import json
import os
import shlex
import sys
import sysconfig
from pathlib import Path

import gpulet
from gpulet.engines import interpreters, pack
from gpulet.launch import shortcut, worker
from gpulet.settings import DEFAULT_PATH

# program -> (module, the peer's program that it stands in for)
PROGRAMS = {
    "gpulet-runtime": ("gpulet.launch.runtime", "nvidia-container-runtime"),
    "gpulet-hook": ("gpulet.launch.hook", "nvidia-container-runtime-hook"),
    "gpulet-container-cli": ("gpulet.launch.container_cli", "nvidia-container-cli"),
    "gpulet-cdi-hook": ("gpulet.launch.cdi_hook", "nvidia-cdi-hook"),
}

# started as those are, and nobody's stand-in
OWN = {"gpulet-prefork": "gpulet.launch.prefork"}

# programs that live long and load libraries as usual: only their interpreter is fixed
LASTING = {"gpulet-device-plugin": ("gpulet.plugin.entry", "nvidia-device-plugin")}

# the peer's programs that one of ours is when it is called by their name
COMPANIONS = {"mps-control-daemon": "gpulet-device-plugin", "config-manager": "gpulet-device-plugin"}

SHELL = Path("/bin/sh")
WORKERS = Path("/run/gpulet/workers")

# Linux reads at most 256 bytes of a "#!" line, the newline included (BINPRM_BUF_SIZE, linux/binfmts.h)
SHEBANG_LIMIT = 255


def first_lines(interpreter: str, flags: str, before: str = "") -> str:
    """The lines that start the interpreter: a #! line, or where its path doesn't fit one, a shell that becomes it.
    before: what a shell is to do first."""
    shebang = f"#!{interpreter} {flags}"
    if not before and len(shebang.encode()) <= SHEBANG_LIMIT and not set(interpreter) & set(" \t\n'\""):
        return shebang + "\n"
    return _by_shell(f'{before}exec {shlex.quote(interpreter)} {flags} "$0" "$@"')


def _by_shell(commands: str) -> str:
    """Lines that are commands to the shell, the last of which doesn't return, and to Python, which reads the same file,
    a string."""
    return f"#!{SHELL}\n''':'\n{commands}\n'''\n"


# Becomes the low-level runtime at once where launch/shortcut.py has kept which one, and `create` isn't among the words.
# What dash and others have built in is all that is used: another program would take as long as Python.
_SHORTCUT = f"""\
gpulet_by=shortcut
for gpulet_word; do
  case $gpulet_word in create) gpulet_by=worker ;; -*version*) gpulet_by=python && break ;; esac
done
if [ $gpulet_by = shortcut ]; then
  gpulet_home=${{XDG_CONFIG_HOME:-{os.path.dirname(os.path.dirname(DEFAULT_PATH))}}}
  gpulet_config=${{GPULET_CONFIG:-${{NVIDIA_CTK_CONFIG_FILE_PATH:-$gpulet_home/nvidia-container-runtime/config.toml}}}}
  gpulet_kept=${{gpulet_config%/*}}/.${{gpulet_config##*/}}{shortcut.SUFFIX}
  if [ -O "$gpulet_kept" ] && [ -f "$gpulet_kept" ] && [ -f "$gpulet_config" ] &&
    ! [ "$gpulet_kept" -nt "$gpulet_config" ] && ! [ "$gpulet_config" -nt "$gpulet_kept" ] &&
    {{ IFS= read -r gpulet_low && IFS= read -r gpulet_path; }} <"$gpulet_kept" &&
    [ "$gpulet_path" = "$PATH" ] && [ -x "$gpulet_low" ]; then exec "$gpulet_low" "$@"; fi
fi
"""

# Has a worker (launch/worker.py) do what Python would be started for, and becomes what it answers. Descriptors that an
# engine hands on to the container stay as they are. The pipe for answers is opened for both, which waits for nobody,
# only until it is open for reading: from then on its other end is the worker's alone, and the worker's death is its
# end. Once it is asked the worker copies standard error, so nothing but standard output is redirected then.
_BY_WORKER = """\
if [ $gpulet_by = worker ] && ! [ -e /proc/self/fd/{asked} ] && ! [ -e /proc/self/fd/{held} ]; then
  set -C
  for gpulet_at in {folder}/*; do
    if {{ echo $$ >"$gpulet_at/{taken}"; }} 2>/dev/null; then
      gpulet_answer=
      if {{ command exec {asked}<>"$gpulet_at/{answer}" {held}</proc/self/fd/{asked} {asked}<>"$gpulet_at/{ask}"
      }} 2>/dev/null; then
        echo >&{asked}
        IFS= read -r gpulet_answer <&{held} || gpulet_answer=
      fi
      exec {asked}>&- {held}<&-
      case $gpulet_answer in
        /*) exec "$gpulet_answer" "$@" ;;
        [0-9]*) exit "$gpulet_answer" ;;
      esac
      break
    fi
  done
fi
"""
FAST_SHELLS = ("dash", "busybox")  # start in less than a millisecond; bash takes two

# Says that Python is gone, as after an upgrade of the distribution, where people get to see it: in the engine's --log
# file, in its format.
_GONE = """\
[ -x {interpreter} ] || {{
  gpulet_log= gpulet_format= gpulet_last=
  for gpulet_word; do
    case $gpulet_last in --log) gpulet_log=$gpulet_word ;; --log-format) gpulet_format=$gpulet_word ;; esac
    case $gpulet_word in --log=*) gpulet_log=${{gpulet_word#*=}} ;; --log-format=json) gpulet_format=json ;; esac
    gpulet_last=$gpulet_word
  done
  if [ "$gpulet_format" = json ]; then gpulet_line={json}; else gpulet_line={text}; fi
  [ ! "$gpulet_log" ] || printf '%s\\n' "$gpulet_line" >>"$gpulet_log"
  printf '%s\\n' {message} >&2
  exit 1
}}
"""


def fast_shell() -> bool:
    """Whether this machine's /bin/sh starts so fast that gpulet-runtime's launcher is a script for it."""
    return SHELL.resolve().name in FAST_SHELLS


def _before(module: str, interpreter: str, workers: str) -> str:
    """What a launcher's shell does before Python starts, "" where there is nothing, or no shell that is worth it.
    workers: the folder that holds theirs."""
    if module != "gpulet.launch.runtime" or not fast_shell():
        return ""
    message = f"gpulet-runtime: the Python that it was installed with is gone: {interpreter}; run: gpulet install"
    line = json.dumps({"level": "error", "msg": message})
    text = f"level=error msg={json.dumps(message)}"
    quoted = {"json": line, "text": text, "message": message, "interpreter": interpreter}
    names: dict[str, object] = {"asked": worker.ASKED, "held": worker.HELD}
    names |= {"ask": worker.ASK, "answer": worker.ANSWER, "taken": worker.TAKEN}
    by_worker = _BY_WORKER.format(folder=shlex.quote(workers), **names) if workers else ""
    return _SHORTCUT + by_worker + _GONE.format(**{name: shlex.quote(value) for name, value in quoted.items()})


def launcher_text(
    module: str, interpreter: str = sys.executable, modules: tuple[Path, int] | None = None, workers: str = ""
) -> str:
    """The text of one launcher: isolated interpreter, and after its own modules, gpulet's folder and its libraries'.
    modules: the pack that the modules come out of (its path and its head's length); workers: the folder where those of
    the same pack wait."""
    source = str(Path(gpulet.__file__).resolve().parent.parent)
    libraries = sysconfig.get_paths()["purelib"]
    return (
        f"{first_lines(interpreter, '-ISXutf8', _before(module, interpreter, workers))}"
        "import marshal, posix, sys\n"  # all of them are built in; this text is compiled in every start, so it is short
        f"sys.path += [{source!r}, {libraries!r}]\n"
        f"{_from_pack(*modules) if modules else ''}"
        "try: from gpulet.launch.start import run\n"
        "except ImportError:\n"
        f"    sys.exit(f'{{sys.argv[0]}}: gpulet is not in {{sys.path[-2]}} any more; run: gpulet install')\n"
        f"run({', '.join(map(repr, [module, workers] if module in OWN.values() else [module]))})\n"
    )


def _from_pack(path: Path, length: int) -> str:
    return (
        "try:\n"
        f"    file = posix.open({str(path)!r}, posix.O_CLOEXEC)\n"
        f"    head = posix.pread(file, {length}, 0)\n"
        "    if head[:4] == sys.modules['_frozen_importlib_external'].MAGIC_NUMBER:\n"
        "        code, index = marshal.loads(head[4:])\n"
        "        space = {'__name__': 'gpulet.engines.packed'}\n"
        "        exec(code, space)\n"
        f"        space['install'](file, {length}, index)\n"
        "except (OSError, ValueError, EOFError, TypeError): pass\n"
    )


def lasting_text(module: str, interpreter: str = sys.executable) -> str:
    """The text for a program that lives long: isolated from the caller's environment, with `site`. A SIGHUP, which
    would end the interpreter while it starts, is ignored until the program heeds it: it reads its settings later."""
    start = _by_shell(f'trap \'\' HUP\nexec {shlex.quote(interpreter)} -I "$0" "$@"')
    return f"{start}import sys\nfrom {module} import main\nsys.exit(main())\n"


def write_launchers(folder: Path, workers: Path = WORKERS) -> dict[str, Path]:
    """Writes every launcher into a folder, each aside and renamed, mode 0755; gives program -> path. workers: where
    workers wait, each installation's in a folder of its own."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        path.chmod(0o755)  # whatever the umask: engines may run as other users
    # a launcher runs once per container: compiled modules must be there before the first one
    compileall.compile_dir(str(Path(gpulet.__file__).parent), quiet=2, maxlevels=3)
    interpreter, standard = interpreters.best()
    modules = pack.write(folder, standard)
    own = str(workers / modules[0].name.removeprefix(pack.NAME)) if fast_shell() else ""
    programs = {program: module for program, (module, _peer) in PROGRAMS.items()} | OWN
    texts = {program: launcher_text(module, interpreter, modules, own) for program, module in programs.items()}
    texts |= {program: lasting_text(module) for program, (module, _peer) in LASTING.items()}
    written = {}
    for program, text in texts.items():
        written[program] = folder / program
        pack.put(written[program], text.encode(errors="surrogateescape"), 0o755)
    pack.sweep(folder, modules[0])
    return written

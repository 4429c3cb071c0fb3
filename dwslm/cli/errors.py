"""The user's mistakes as one line on stderr and exit code 1; ours as a traceback."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

PACKAGE = Path(__file__).resolve().parent.parent


OPTIONS = ("help", "hydra-help", "version", "cfg", "resolve", "package", "run", "multirun", "shell-completion", "config-path",
           "config-name", "config-dir", "experimental-rerun", "info")  # fmt: skip
"""Hydra's own, in full."""
PLAIN_WIDTH = 140  # columns of tables where the output is a file or a pipe


def make_console() -> Console:
    """Standard output; as wide as the terminal, or wide enough for our tables where there is none."""
    console = Console(soft_wrap=True)
    return console if console.is_terminal else Console(soft_wrap=True, width=PLAIN_WIDTH)


@contextmanager
def one_line_errors(wanted: str = "experiment") -> Iterator[None]:
    """Leaves with code 1 and one line for what a user can put right, with 75 where a signal asked a run to leave.

    That is what our own code raises as ValueError, OSError or FloatingPointError, and what Hydra says of a command line. The
    same kinds of error raised inside a library are faults of ours, and show where they come from. `wanted` is the setting that a
    word alone on the command line may have been meant for.
    """
    try:
        yield
    except _preempted():
        from dwslm.train.signals import EXIT_CODE

        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(130)
    except _config_errors() as error:
        from dwslm.config import explain

        fail(explain(error, wanted))
    except OSError as error:
        # Python's own words name the file too; one without a name tells the user nothing.
        if not raised_by_us(error) and error.filename is None:
            raise
        fail(f"{error.filename}: {error.strerror}" if error.filename is not None and error.strerror else str(error))
    except (ValueError, FloatingPointError, OverflowError) as error:
        if raised_in(error, "hydra", "omegaconf"):
            from dwslm.config import explain

            fail(explain(error, wanted, sys.argv[1:]))
        if not raised_by_us(error) or isinstance(error, OverflowError):
            raise
        fail(str(error))


# Imported once something has gone wrong: with them comes PyTorch, 0.2 GB and a second that preparing data can do without.


def _preempted() -> type[BaseException]:
    from dwslm.train.signals import Preempted

    return Preempted


def _config_errors() -> tuple[type[BaseException], ...]:
    from dwslm.config import CONFIG_ERRORS

    return CONFIG_ERRORS


def run_hydra(main: Callable[[], object], wanted: str = "experiment") -> None:
    """Calls a function that Hydra has wrapped, with Hydra's own complaints about the command line as one line too."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # else Hydra prints its own many lines and hides the error
    for word in sys.argv[1:]:
        # Hydra's options may be shortened: --experiment=main would be its --experimental-rerun.
        if word.startswith("--") and word[2:].split("=")[0] not in ("", *OPTIONS):
            meant = word.lstrip("-")
            fail(f"{word}: settings have no dashes: {meant if '=' in meant else f'{meant}=VALUE'}")
    with one_line_errors(wanted):
        main()


def fail(message: str) -> None:
    """Prints `error: message` and exits with code 1."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(1)


def raised_by_us(error: BaseException) -> bool:
    """Whether the innermost frame of the error is in this package."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and PACKAGE in Path(frames[-1].filename).resolve().parents


def raised_in(error: BaseException, *packages: str) -> bool:
    """Whether the innermost frame of the error that has a file is in one of these packages."""
    files = [Path(frame.filename) for frame in traceback.extract_tb(error.__traceback__)]
    files = [file for file in files if file.is_file()]
    homes = [Path(str(sys.modules[name].__file__)).parent for name in packages if name in sys.modules]
    return bool(files) and any(home in files[-1].parents for home in homes)

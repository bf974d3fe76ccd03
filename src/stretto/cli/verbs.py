"""What all verbs share: how failures end, and flags with an optional value."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from stretto.cli.guard import check_inputs, check_outputs
from stretto.errors import StrettoError
from stretto.training.processes import is_main_process

HELP = {"--help", "-h"}
NOTHING_KEPT = "The same command starts from the beginning."
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
PIPE_CLOSED = 141  # 128 + SIGPIPE
TERMINATED = 143  # 128 + SIGTERM


class Verbs(TyperGroup):
    """Turns every expected failure into one line on stderr and an exit code. Other exceptions keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a full disk behind `> file` shows up here
            return result
        except StrettoError as error:
            _tell(f"error: {error}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt as interrupt:
            _tell(f"interrupted. {' '.join(getattr(interrupt, '__notes__', ())) or NOTHING_KEPT}")
            raise typer.Exit(INTERRUPTED) from None
        except OSError as error:
            _close_stdout()
            if error.errno == errno.EPIPE:  # the reader (`head`) has closed the pipe
                raise typer.Exit(PIPE_CLOSED) from None
            where = f"'{error.filename}'" if error.filename else "a file"
            reason = error.strerror or str(error)
            _tell(f"error: Expected to read or write {where}, got: {reason}. Free some space or choose another place.")
            raise typer.Exit(1) from None


class Verb(TyperCommand):
    """A verb whose `--json` needs no value: alone it means `--json -`, stdout. It never overwrites its input."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_json_target(args))

    def invoke(self, ctx: Any) -> Any:
        check_outputs(ctx)
        check_inputs(ctx)
        return super().invoke(ctx)


def with_json_target(args: list[str]) -> list[str]:
    """Add the missing '-' after a bare `--json`."""
    complete: list[str] = []
    for place, arg in enumerate(args, start=1):
        complete.append(arg)
        if arg == "--json" and (place == len(args) or args[place].startswith("--")):
            complete.append("-")
    return complete


def examples(text: str) -> str:
    """An epilog that is printed line by line, without wrapping."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in text.strip().splitlines())


def _tell(line: str) -> None:
    close_bars()
    if is_main_process():  # every process of a torchrun meets the same error
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)


def close_bars() -> None:
    """End the lines of interrupted progress bars, so that the error message starts on a new line."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    for bar in list(getattr(bars, "_instances", ())):
        with suppress(OSError, ValueError):
            bar.close()


def _close_stdout() -> None:
    """Discard what is left in the buffer, or Python would report the error again at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

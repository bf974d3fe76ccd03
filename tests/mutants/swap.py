"""A mutant applied to modules that are loaded already: the code of its functions is exchanged.

Kills found this way are real: the changed code ran, and a test failed. A mutant that survives may have been used before
it was applied (at import), and one outside of functions cannot be applied; both are tried once more on a fresh import.
"""

from __future__ import annotations

import gc
from pathlib import Path
from types import CodeType, FunctionType

from listed import Mutant


def codes(code: CodeType, outer: tuple[str, ...] = ()) -> dict[tuple[str, ...], CodeType]:
    """The code itself and all that is nested in it, by the way to it."""
    found = {outer: code}
    for place, part in enumerate(code.co_consts):
        if isinstance(part, CodeType):
            found |= codes(part, (*outer, f"{place}:{part.co_name}"))
    return found


def own(code: CodeType) -> object:
    """What a code does, without what is nested in it."""
    constants = [part for part in code.co_consts if not isinstance(part, CodeType)]
    return code.co_code, constants, code.co_names, code.co_varnames, code.co_freevars


def swap(mutant: Mutant, source: Path) -> bool:
    """Apply a mutant to the loaded module of its file; False if it changes more than functions."""
    path = source / "stretto" / mutant.file
    texts = path.read_text(encoding="utf-8"), mutant.apply(source)
    before, after = (codes(compile(text, str(path), "exec")) for text in texts)
    if before.keys() != after.keys():
        return False
    changed = [way for way in before if own(before[way]) != own(after[way])]
    if not changed or any(not before[way].co_flags & 0x2 for way in changed):  # CO_NEWLOCALS: a function's
        return False
    # a nested function is made anew by the one around it: both are exchanged
    wanted = {way[:size] for way in changed for size in range(1, len(way) + 1)}
    new = {(before[way].co_qualname, before[way].co_firstlineno): after[way] for way in wanted}
    gc.unfreeze()
    for function in [each for each in gc.get_objects() if type(each) is FunctionType]:
        code = function.__code__
        if code.co_filename == str(path) and (code.co_qualname, code.co_firstlineno) in new:
            function.__code__ = new[code.co_qualname, code.co_firstlineno]
    return True

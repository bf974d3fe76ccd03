"""Whether the Hugging Face hub can be reached: checked with one short request, before anything is loaded from it.

The libraries that load from it try six times for each of several files before they give up: minutes without a network.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from stretto.errors import StrettoError

PATIENCE = 3.0  # seconds for an answer
ASK_AGAIN = 60.0  # seconds for which an answer is reused


def reachable() -> bool:
    """Whether the hub answers; False in offline mode (HF_HUB_OFFLINE)."""
    return _answers(int(time.monotonic() / ASK_AGAIN))


@lru_cache(maxsize=1)
def _answers(period: int) -> bool:
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # any exception: they depend on the HTTP client
        return False
    return True


def check_model_name(name_or_path: str) -> None:
    """Refuse a model that is neither a folder, nor cached, nor on a hub that can be reached."""
    if Path(name_or_path).is_dir():
        return
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name_or_path)
    except HFValidationError:
        reason, advice = "nor a name on the hub (owner/name)", "Check the path"
    else:
        if isinstance(try_to_load_from_cache(name_or_path, "config.json"), str) or reachable():
            return
        reason = "nor in the cache of hub models, and the hub cannot be reached"
        advice = "Check the path or the network"
    raise StrettoError(
        f"Expected a model folder or a name on the hub, got '{name_or_path}', which is neither a folder here "
        f"{reason}. {advice}."
    )

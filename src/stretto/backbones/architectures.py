"""Architectures of our own, in the form of Hugging Face models.

`announce` makes the Auto classes of transformers know them without importing transformers: each registration waits for
the module it writes to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def register_configs() -> None:
    from transformers import AutoConfig

    from stretto.architectures.alberta_config import AlbertaConfig

    AutoConfig.register(AlbertaConfig.model_type, AlbertaConfig, exist_ok=True)


def register_models() -> None:
    from transformers.models.auto import modeling_auto

    from stretto.architectures import alberta

    modeling_auto.AutoModel.register(alberta.AlbertaConfig, alberta.AlbertaModel, exist_ok=True)
    for head in ("MaskedLM", "SequenceClassification", "TokenClassification", "QuestionAnswering"):
        auto_class: Any = getattr(modeling_auto, f"AutoModelFor{head}")
        auto_class.register(alberta.AlbertaConfig, getattr(alberta, f"AlbertaFor{head}"), exist_ok=True)


#: What is to be done once a module of transformers has been imported.
WAITING: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": register_configs,
    "transformers.models.auto.modeling_auto": register_models,
}


class Watcher(MetaPathFinder):
    """Finds modules as Python does, and has those in `WAITING` followed by their registration."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in WAITING:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: Any) -> None:
                execute(module)
                WAITING[name]()

            setattr(spec.loader, "exec_module", execute_and_register)  # noqa: B010 - a method of this one loader
        return spec


def announce() -> None:
    """Register now what can be registered, and the rest as soon as transformers is imported."""
    for name, register in WAITING.items():
        if name in sys.modules:
            register()
    sys.meta_path.insert(0, Watcher())

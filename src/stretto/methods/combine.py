"""Two methods at once: one drops or freezes tokens, the other lets texts leave early.

`length_adaptive+deebert` shortens a text from layer to layer and stops where its answer is certain, so that the two
savings multiply. Any method that drops or freezes can be combined with any method that exits: `A+B`.

The parts are trained one after the other: first A, then the exits of B on shortened states, which they also read in
inference. The backbone is trained once, by the objective of B: that of a decoder needs all its blocks to answer.
Afterwards a search on the dev data tries pairs of dials and keeps the Pareto frontier: two dials become one.

    decision = decisions of A at its dial and of B at its own dial   -> `Combined.decide`
    (dial of A, dial of B) on the frontier, by budget                -> `Combined.dials`
    the frontier                                                     -> `stretto.budget.frontier`

Differs from the paper: there is no paper. Kim and Cho (Length-Adaptive Transformer) and Modarressi et al. (AdapLeR)
leave the combination with early exit open.

Dial: the budget. The most expensive pair of dials on the frontier whose cost on the search data was at most this. 1 is
the full model. Before training, the frontier is a guess: both dials go from off to their cheapest value together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn

from stretto.engine.decider import Decider, OwnHead, ask
from stretto.engine.replay import Above
from stretto.errors import StrettoError
from stretto.methods.base import Dial, Method, Shape, Stage
from stretto.methods.exits import ExitHeads
from stretto.methods.selection import within_budget
from stretto.methods.settings import FinetuningConfig
from stretto.state import Decision, State
from stretto.tasks import Task

if TYPE_CHECKING:
    from stretto.backbones import Backbone

#: Points of the frontier before a search.
GUESSED_POINTS = 10
SHARED = frozenset(field.name for field in dataclasses.fields(FinetuningConfig))


@dataclass(frozen=True)
class CombinedConfig(FinetuningConfig):
    """Settings of a combination besides those of its parts, which have the name of their method as a prefix."""

    costs: tuple[float, ...] = ()
    """Costs of the pairs of dials that the search found, falling; written by the training."""
    frontier: tuple[tuple[float, ...], ...] = ()
    """Those pairs: the dial of the first part and the dial of the second."""

    parts: ClassVar[tuple[type[Method], ...]] = ()

    def of(self, part: type[Method]) -> Any:
        """The Config of one part."""
        names = [field.name for field in dataclasses.fields(part.Config)]
        return part.Config(**{name: getattr(self, setting(part, name)) for name in names})


def setting(part: type[Method], name: str) -> str:
    """What a setting of a part is called in a combination."""
    return name if name in SHARED else f"{part.name}_{name}"


def config_of(first: type[Method], second: type[Method]) -> type[CombinedConfig]:
    """A Config with the settings of both; the defaults of shared ones are those of the second, whose objective trains
    the backbone."""
    settings = []
    for part in (first, second):
        hints = get_type_hints(part.Config, include_extras=True)
        for field in dataclasses.fields(part.Config):
            if field.name not in SHARED or part is second:
                default = dataclasses.field(default=field.default)
                settings.append((setting(part, field.name), hints[field.name], default))
    name = f"{first.__name__}And{second.__name__}Config"
    return dataclasses.make_dataclass(
        name, settings, bases=(CombinedConfig,), namespace={"parts": (first, second)}, frozen=True
    )


def merged(one: Decision, other: Decision) -> Decision:
    """The decisions of two deciders at the same point; they never use the same verb."""
    said = {name: value for name, value in vars(other).items() if value is not None}
    return dataclasses.replace(one, **said)


class Beneath:
    """A decider that runs together with another one beneath it, which drops or freezes tokens at separate dials."""

    def __init__(self, beneath: Decider, dials: Tensor, decider: Decider) -> None:
        """`dials` ([batch]): for each sequence of the input, for the decider beneath."""
        self.beneath, self.dials, self.decider = beneath, dials, decider
        self.points = beneath.points | decider.points
        self.stacks = beneath.stacks | decider.stacks
        self.exits, self.restore = decider.exits, beneath.restore

    def own_head(self) -> OwnHead | None:
        return head_at(self.beneath, lambda state: self.dials[state.ids]) or self.decider.own_head()

    def decide(self, state: State) -> Decision:
        return merged(ask(self.beneath, state, self.dials[state.ids]), ask(self.decider, state))


def above_drawn(beneath: Method) -> Above:
    """Puts a decider above a method, which works on every sequence at a dial drawn for it."""
    return lambda decider, batch: Beneath(beneath, drawn_dials(beneath, batch), decider)


class HeadAtDial:
    """A part's own head, used at the dial of that part."""

    def __init__(self, head: OwnHead, dial: Callable[[State], Tensor]) -> None:
        self.head, self.dial, self.macs = head, dial, head.macs

    def answers(self, state: State) -> Tensor:
        return self.head.answers(dataclasses.replace(state, dial=self.dial(state)))

    def pool_rows(self, rows: Tensor, state: State) -> Tensor:
        return self.head.pool_rows(rows, state)

    def __call__(self, pooled: Tensor) -> Tensor:
        return self.head(pooled)


def head_at(decider: Decider, dial: Callable[[State], Tensor]) -> HeadAtDial | None:
    head = decider.own_head()
    return None if head is None else HeadAtDial(head, dial)


class Combined(Method):
    """The base of all combinations; `combination` makes one."""

    parts: ClassVar[tuple[type[Method], type[Method]]]
    monotone = False  # fewer tokens may make an exit less certain
    dial = Dial(
        "budget", "the most expensive pair of dials that costs at most this fraction of the full model is used",
        off=1.0, sweep=(1.0,), upper=1.0,
    )  # fmt: skip

    def __init__(self, config: CombinedConfig, shape: Shape, task: Task) -> None:
        nn.Module.__init__(self)  # the parts check the task and hold the weights
        self.config, self.shape, self.task = config, shape, task
        first, second = self.parts
        self.first, self.second = first(config.of(first), shape, task), second(config.of(second), shape, task)
        self.points, self.restore = self.first.points | self.second.points, self.first.restore
        self.stacks = self.first.stacks | self.second.stacks
        self.second.overruled = self.first.own_head() is not None
        self.reads_words = self.first.reads_words or self.second.reads_words
        self.set_frontier(config.costs, config.frontier)

    def set_frontier(self, costs: Sequence[float], frontier: Sequence[Sequence[float]]) -> None:
        """Pairs of dials with falling costs below 1; none: the guess. The full model is always the first."""
        if not costs:
            steps = [step / GUESSED_POINTS for step in range(1, GUESSED_POINTS + 1)]
            costs = [1 - 0.9 * step for step in steps]
            frontier = [[along(part.dial, step) for part in (self.first, self.second)] for step in steps]
        fits = len(costs) == len(frontier) and all(len(pair) == 2 for pair in frontier)
        if not fits or any(dear <= cheap for dear, cheap in zip((1.0, *costs), costs, strict=False)):
            raise StrettoError(
                f"Expected a frontier of pairs of dials with falling costs below 1, got {len(costs)} costs and "
                f"{len(frontier)} pairs. Train the combination again."
            )
        off = [self.first.dial.off, self.second.dial.off]
        self.frontier = torch.tensor([off, *frontier], dtype=torch.float64)  # [F + 1, 2]
        self.costs = torch.tensor([1.0, *costs], dtype=torch.float64)  # [F + 1]
        sweep = tuple(self.costs.tolist())
        self.dial = dataclasses.replace(type(self).dial, sweep=sweep, trained=self.trained_budget())

    def trained_budget(self) -> float | None:
        """The highest budget whose dials were trained, if a part was not trained at off; see `Dial.trained`."""
        dials = (self.first.dial, self.second.dial)
        if all(dial.trained is None for dial in dials):
            return None
        budgets, pairs = self.costs.tolist(), self.frontier.tolist()
        trained = (
            budget
            for budget, pair in zip(budgets, pairs, strict=True)
            if all(dial.within_trained(value) for dial, value in zip(dials, pair, strict=True))
        )
        return next(trained, budgets[-1])

    @property
    def exits(self) -> ExitHeads | None:
        return self.second.exits

    def attach(self, backbone: Backbone) -> None:
        self.first.attach(backbone)
        self.second.attach(backbone)

    def dials(self, budget: Tensor) -> Tensor:
        """[B] -> [B, 2] the dials of both parts."""
        return self.frontier.to(budget.device)[within_budget(self.costs, budget)]

    def own_head(self) -> OwnHead | None:
        answering, place = (self.first, 0) if self.second.overruled else (self.second, 1)
        return head_at(answering, lambda state: self.dials(state.dial)[:, place])

    def decide(self, state: State) -> Decision:
        first, second = self.dials(state.dial).unbind(dim=1)
        return merged(ask(self.first, state, first), ask(self.second, state, second))

    def found(self) -> dict[str, str]:
        return {**self.first.found(), **self.second.found()}

    def stages(self) -> list[Stage]:
        """Those of the first part, then those of the second with the first beneath it. The backbone learns once, what
        the second part needs."""
        backbone, *others = self.first.stages()
        finetuning = self.second.finetuning()
        backbone = dataclasses.replace(backbone, decides=finetuning.decides, objective=finetuning.objective)
        above = [stage for stage in self.second.stages() if stage != finetuning]  # it has been done
        return [
            *(dataclasses.replace(stage, method=self.first) for stage in (backbone, *others)),
            *(dataclasses.replace(stage, method=self.second, beneath=self.first, taught=True) for stage in above),
        ]


def along(dial: Dial, part: float) -> float:
    """A value of the sweep: 0 is off, 1 the cheapest."""
    return dial.sweep[round(part * (len(dial.sweep) - 1))]


def drawn_dials(method: Method, count: int, generator: torch.Generator | None = None) -> Tensor:
    """[count] dials drawn from the sweep of a method, off among them."""
    sweep = torch.tensor(method.dial.sweep, dtype=torch.float64)
    return sweep[torch.randint(len(sweep), (count,), generator=generator)]


def combination(first: type[Method], second: type[Method]) -> type[Combined]:
    """The class of `first+second`."""
    if not first.verbs & {"drop", "freeze"} or "exit" not in second.verbs:
        raise StrettoError(
            f"Expected a method that drops or freezes tokens, then one that exits, got {first.name}+{second.name}. "
            "For example length_adaptive+deebert."
        )
    return type(
        f"{first.__name__}And{second.__name__}", (Combined,),
        {
            "__module__": __name__, "parts": (first, second), "name": f"{first.name}+{second.name}",
            "Config": config_of(first, second), "verbs": first.verbs | second.verbs,
            "needs": first.needs & second.needs,
            "uses_exits": second.uses_exits,
        },
    )  # fmt: skip

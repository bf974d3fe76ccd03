"""A model in one stage of its training: batches in, loss out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stretto.backbones.decoder import EncoderDecoder
from stretto.data.tokenise import as_inputs
from stretto.engine.decider import Decider, Silent
from stretto.engine.decode_reference import DecoderReference, Given
from stretto.engine.replay import Recorder
from stretto.methods.base import TEXT_NOTE, Pass, Stage, Targets, TrainingBatch
from stretto.methods.combine import above_drawn
from stretto.model import AdaptiveModel
from stretto.saving.files import untied
from stretto.state import Inputs


class Learner(nn.Module):
    """What `transformers.Trainer` calls its model."""

    def __init__(self, model: AdaptiveModel, stage: Stage) -> None:
        super().__init__()
        self.model, self.stage = model, stage
        # set by the trainer: optimizer steps done, and the planned epochs of the stage (`max_steps` may shorten them)
        self.step, self.epoch = 0, 0.0
        for parameter in model.encoder.parameters():
            parameter.requires_grad_(stage.trains_backbone)

    def state_dict(self, *args: Any, **named: Any) -> Any:
        """As `transformers.Trainer` can save it."""
        return untied(super().state_dict(*args, **named))

    def train(self, mode: bool = True) -> Learner:
        super().train(mode)
        if not self.stage.trains_backbone:
            self.model.encoder.eval()  # a frozen backbone has no dropout either
        return self

    @property
    def cut(self) -> tuple[int, ...]:
        """Layers from above which no gradient comes back."""
        return self.stage.layers if self.stage.detached else ()

    def forward(
        self,
        labels: Tensor,
        example_id: Tensor | None = None,
        teacher: Tensor | None = None,
        known: Tensor | None = None,
        **batch: Tensor,
    ) -> dict[str, Tensor]:
        """From tokens (`input_ids`, …), or from a recording of the frozen backbone (`training.frozen`).

        Only `labels` may have "label" in its name: `Trainer` looks for all such arguments when it evaluates."""
        stage = self.stage
        noted = {name: batch.pop(name) for name in list(batch) if name.startswith(TEXT_NOTE)}
        targets = Targets(labels, teacher, None if known is None else known.bool(), noted)
        if stage.decides:
            return {"loss": stage.objective(self.training_batch(as_inputs(batch), targets))}
        if "pooled" in batch:
            read = [batch["pooled"][:, layer - 1] for layer in stage.layers]
            forward = self.answers(read, batch["last"], targets)
        else:
            forward = self.read(as_inputs(batch), targets)
        logits = forward.logits.transpose(0, 1)  # [B, E + 1, C], as Trainer gathers by row
        return {"loss": stage.objective(forward), "logits": logits}

    def training_batch(self, inputs: Inputs, targets: Targets) -> TrainingBatch:
        def run(dial: float | Tensor, skip: tuple[int, ...] = (), context: Any = None) -> Any:
            decider = self.above_beneath(self.model.method, len(targets.labels))
            writes = self.model.task.answers == "text"
            output = self.model.reference.run(inputs, decider, dial, skip=skip, context=context, keep_hidden=writes)
            if writes:
                assert output.hidden is not None
                output.logits = self.say(output.hidden, inputs, targets.labels)
            return output

        def last_states() -> Tensor:
            silent = self.above_beneath(Silent(), len(targets.labels))
            hidden = self.model.reference.run(inputs, silent, 0.0, keep_hidden=True).hidden
            assert hidden is not None
            return hidden

        return TrainingBatch(inputs, targets, run, self.step, self.epoch, self.model.reference, last_states)

    def above_beneath(self, decider: Decider, batch: int) -> Decider:
        """The decider, above the part of a combination that shortens texts meanwhile if there is one."""
        beneath = self.stage.beneath
        return decider if beneath is None else above_drawn(beneath)(decider, batch)

    def read_shortened(self, inputs: Inputs, targets: Targets) -> Pass:
        """The same as `read` with the part of the combination beneath at work: exits read what they will serve."""
        exits, stage, batch = self.model.method.exits, self.stage, len(targets.labels)
        assert exits is not None
        recorder = Recorder(exits)
        with torch.set_grad_enabled(torch.is_grad_enabled() and stage.trains_backbone):
            shortened = self.above_beneath(recorder, batch)
            final = self.model.reference.run(inputs, shortened, 0.0, cut=self.cut).logits
        pooled = recorder.pooled(batch, self.model.backbone.n_layers - 1)  # [B, E, d]
        read = [pooled[:, layer - 1] for layer in stage.layers]
        early = [exits(layer, x) for layer, x in zip(stage.layers, read, strict=True)]
        logits = torch.stack([*early, *([final] if stage.final else [])])
        return Pass(stage.layers, logits, torch.stack(read), targets, self.step)

    def read(self, inputs: Inputs, targets: Targets) -> Pass:
        """A full pass without decisions, with the answers of the exits of this stage."""
        exits, stage = self.model.method.exits, self.stage
        if stage.layers and stage.beneath is not None:
            return self.read_shortened(inputs, targets)
        if self.model.task.answers == "text":
            last = self.model.reference.hidden_states(inputs)[-1]
            logits = self.say(last, inputs, targets.labels).unsqueeze(0)
            return Pass((), logits, last.new_zeros(0, *last.shape), targets, self.step)
        with torch.set_grad_enabled(torch.is_grad_enabled() and stage.trains_backbone):
            depth = None if stage.final else max(stage.layers)
            states = self.model.reference.hidden_states(inputs, depth, cut=self.cut)
            read = [exits.pool_padded(states[n], inputs.attention_mask) for n in stage.layers] if exits else []
            last = self.model.backbone.head.pool_padded(states[-1], inputs.attention_mask)
        return self.answers(read, last, targets)

    def say(self, hidden: Tensor, inputs: Inputs, labels: Tensor) -> Tensor:
        """What the decoder says at each token of the right texts: the source's [B, S, d] and [B, T] -> [B, T, V]."""
        backbone = self.model.backbone
        assert isinstance(backbone, EncoderDecoder)
        decoder = DecoderReference(backbone)
        given = Given.from_labels(hidden, inputs.attention_mask, labels, backbone.config)
        return decoder.logits(decoder.states(given)[-1])

    def answers(self, read: list[Tensor], last: Tensor, targets: Targets) -> Pass:
        """Logits of the exits for `read` ([B, d] each) and of the head for `last` ([B, d]; all tokens: [B, T, d])."""
        backbone, exits, stage = self.model.backbone, self.model.method.exits, self.stage
        with torch.set_grad_enabled(torch.is_grad_enabled() and stage.trains_backbone):
            final = [backbone.head(last)] if stage.final else []
        early = [exits(layer, x) for layer, x in zip(stage.layers, read, strict=True)] if exits else []
        seen = torch.stack(read) if read else last.new_zeros(0, *last.shape)
        return Pass(stage.layers, torch.stack(early + final), seen, targets, self.step)

"""The decoder engine: texts written token by token, the live rows of all sentences in one matrix. Inference only.

A row is a sentence, or one of its beams. At each step every row has one new token. A token that a decider freezes
before a block leaves there: it is not computed above, and the output head reads the state it left with. Its keys and
values in the blocks above are computed later, when its row next goes that deep (`decode_cache`). A sentence leaves as
soon as it has ended. Without a decider the texts equal those of Hugging Face's `generate` on the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.backbones.decoder import EncoderDecoder
from stretto.backbones.spec import Weights
from stretto.engine.decider import Decider
from stretto.engine.decode_block import PackedBlock, few, fill
from stretto.engine.decode_cache import Memory, Source, source_groups
from stretto.engine.decode_search import Advance, Beam, Greedy, Search
from stretto.engine.decode_token import Token
from stretto.engine.generation import Generation
from stretto.engine.linear import step_product
from stretto.engine.written import DecoderTrace, Ledger, Text


class DecoderEngine:
    """The weights of a decoder, laid out once."""

    def __init__(self, backbone: EncoderDecoder, dtype: str = "float32") -> None:
        self.backbone, self.dtype = backbone, dtype
        self.blocks = [PackedBlock(spec, number, dtype) for number, spec in enumerate(backbone.block_specs)]
        self.head = step_product(Weights(backbone.lm_head.weight, backbone.head_bias), dtype=dtype)

    @torch.inference_mode()
    def run(
        self, source: Source, generation: Generation, decider: Decider, dial: float | Tensor, *, scored: bool = True
    ) -> tuple[list[Text], DecoderTrace]:
        """A text for each sentence, in order, and what was executed for it. `scored`: greedy texts get a score too."""
        order = source.lengths.argsort(stable=True)  # attention takes sources of nearly equal length in one call
        dials = torch.as_tensor(dial, dtype=torch.float64, device=order.device).expand(len(order))
        ledger = Ledger(source.lengths, self.backbone.n_blocks, generation.num_beams)
        writing = Writing(self, source.take(order), order, generation, decider, dials[order], ledger, scored=scored)
        texts: dict[int, Text] = {}
        while len(writing.ids):
            texts.update(writing.step())
        return [texts[number] for number in range(len(order))], ledger.trace()

    def logits(self, states: Tensor) -> Tensor:
        """[R, d] -> [R, V] in float32."""
        rows = states.shape[0]
        return self.head(fill(self.backbone.for_output(states), few(rows)))[:rows].float()


class Writing:
    """Sentences being written: one token for every row at each step."""

    def __init__(
        self, engine: DecoderEngine, source: Source, ids: Tensor, generation: Generation, decider: Decider,
        dials: Tensor, ledger: Ledger, *, scored: bool,
    ) -> None:  # fmt: skip
        """`source` has the sentences `ids` ([S], their numbers among those that came in), the shortest first."""
        backbone, sentences, beams = engine.backbone, len(source.lengths), generation.num_beams
        device, first = source.rows.device, backbone.block_specs[0]
        self.engine, self.source, self.beams, self.decider = engine, source, beams, decider
        self.listens = "before" in decider.points and "decoder" in decider.stacks
        self.ledger = ledger
        self.keep(ids, dials)
        self.search: Search = (
            Beam(generation, sentences, device) if beams > 1 else Greedy(generation, sentences, device, scored=scored)
        )
        self.memory = Memory(
            n_blocks=backbone.n_blocks, rows=sentences * beams, beams=beams, heads=first.attention.heads,
            size=first.attention.head_size, like=source.rows, lengths=source.lengths,
            groups=source_groups(source.lengths, first), lazy=self.listens,
        )  # fmt: skip

    def keep(self, ids: Tensor, dials: Tensor) -> None:
        """The live sentences by number, and their dials: [S] each."""
        self.ids, self.dials = ids, dials
        self.sentences, self.row_dials = ids, dials  # of each row: [S * beams]
        if self.beams > 1:
            self.sentences, self.row_dials = (each.repeat_interleave(self.beams) for each in (ids, dials))
        self.numbers = torch.arange(len(self.sentences), device=ids.device)
        self.zeros, self.ones = torch.zeros_like(self.numbers), torch.ones_like(self.numbers)
        self.none = torch.zeros_like(self.numbers, dtype=torch.bool)
        self.last_block = torch.full_like(self.numbers, self.engine.backbone.n_blocks)

    def step(self) -> list[tuple[int, Text]]:
        """Write one token for every row; return the sentences (by number) that have ended."""
        memory, backbone = self.memory, self.engine.backbone
        memory.add_token()
        bias = backbone.decoder_bias(memory.length + 1)
        bias = None if bias is None else bias[None, :, None]
        token = Token(self, backbone.embed_texts(self.search.tokens[:, -1:], memory.length).squeeze(1))
        for block in self.engine.blocks:
            if block.number and self.listens:
                token.ask(block.number)
            if not token.live.n_rows:
                break
            token.through(block, bias)
        logits, exits = token.answers(), token.exits
        self.ledger.step(self.sentences, exits)
        memory.length += 1
        return self._follow(self.search.advance(logits, exits))

    def _follow(self, advance: Advance) -> list[tuple[int, Text]]:
        """Reorder what is kept, and remove the sentences that have ended."""
        rows, stay, memory, before = advance.rows, advance.stay, self.memory, self.numbers
        ended = [(int(self.ids[index]), text) for index, text in advance.ended]
        if stay is not None:
            offsets = torch.arange(self.beams, device=stay.device)
            staying = (stay.unsqueeze(1) * self.beams + offsets).flatten()
            rows = staying if rows is None else rows[staying]
            memory.source.take(stay)
            self.keep(self.ids[stay], self.dials[stay])
            if self.listens:
                self.source = self.source.take(stay)
        if rows is not None and not torch.equal(rows, before):
            memory.take(rows)
        return ended

"""The decoder engine: texts written token by token, the live rows of all sentences in one matrix. Inference only.

A row is a sentence, or one of its beams. At each step every row has one new token. A token that a decider freezes
before a block leaves there: it is not computed above, and the output head reads the state it left with. What it would
have written above it is made up for when its row next goes that deep (`decode_cache`). A sentence that has ended leaves
alone. With nobody deciding, texts are those of Hugging Face's `generate` on the same weights.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from stretto.backbones.decoder import EncoderDecoder
from stretto.backbones.spec import Weights
from stretto.engine.decider import Decider, ask
from stretto.engine.decode_block import PackedBlock, few, fill
from stretto.engine.decode_cache import Memory, Source, source_groups
from stretto.engine.decode_search import Advance, Beam, Greedy, Search
from stretto.engine.generation import Generation
from stretto.engine.linear import product
from stretto.engine.written import DecoderTrace, Text
from stretto.errors import StrettoError
from stretto.state import Notes, State, taken


class DecoderEngine:
    """The weights of a decoder, laid out once."""

    def __init__(self, backbone: EncoderDecoder, dtype: str = "float32") -> None:
        self.backbone, self.dtype = backbone, dtype
        self.blocks = [PackedBlock(spec, number, dtype) for number, spec in enumerate(backbone.block_specs)]
        self.head = product(Weights(backbone.lm_head.weight, backbone.head_bias), dtype=dtype)

    @torch.inference_mode()
    def run(
        self, source: Source, generation: Generation, decider: Decider, dial: float | Tensor, *, scored: bool = True
    ) -> tuple[list[Text], DecoderTrace]:
        """A text for each sentence, in order, and what was executed for it. `scored`: greedy texts get a score too."""
        order = source.lengths.argsort(stable=True)  # attention takes sources of nearly equal length in one call
        dials = torch.as_tensor(dial, dtype=torch.float64, device=order.device).expand(len(order))
        trace = DecoderTrace.empty(source.lengths, self.backbone.n_blocks, generation.num_beams)
        writing = Writing(self, source.take(order), order, generation, decider, dials[order], trace, scored=scored)
        texts: dict[int, Text] = {}
        while len(writing.ids):
            texts.update(writing.step())
        return [texts[number] for number in range(len(order))], trace

    def logits(self, states: Tensor) -> Tensor:
        """[R, d] -> [R, V] in float32."""
        read = fill(self.backbone.for_output(states), states.new_empty(few(len(states)), 0))
        return self.head(read)[: len(states)].float()


class Writing:
    """Sentences on their way: one token for every row at each step."""

    def __init__(
        self, engine: DecoderEngine, source: Source, ids: Tensor, generation: Generation, decider: Decider,
        dials: Tensor, trace: DecoderTrace, *, scored: bool,
    ) -> None:  # fmt: skip
        """`source` has the sentences `ids` ([S], their numbers among those that came in), the shortest first."""
        backbone, sentences, beams = engine.backbone, len(source.lengths), generation.num_beams
        device, first = source.rows.device, backbone.block_specs[0]
        self.engine, self.source, self.beams, self.decider = engine, source, beams, decider
        self.listens = "before" in decider.points and "decoder" in decider.stacks
        self.trace = trace
        self.keep(ids, dials)
        self.numbers = torch.arange(sentences * beams, device=device)
        self.zeros = torch.zeros_like(self.numbers)
        self.search: Search = (
            Beam(generation, sentences, device) if beams > 1 else Greedy(generation, sentences, device, scored=scored)
        )
        self.memory = Memory(
            n_blocks=backbone.n_blocks, rows=sentences * beams, beams=beams, heads=first.attention.heads,
            size=first.attention.head_size, like=source.rows, lengths=source.lengths,
            groups=source_groups(source.lengths, first), lazy=self.listens,
        )  # fmt: skip
        self.means = source.mean if self.listens else None  # [S, d]

    def keep(self, ids: Tensor, dials: Tensor) -> None:
        """The live sentences by number, and their dials: [S] each."""
        self.ids, self.dials = ids, dials
        self.sentences, self.row_dials = ids, dials  # of each row: [S * beams]
        if self.beams > 1:
            self.sentences, self.row_dials = (each.repeat_interleave(self.beams) for each in (ids, dials))

    def step(self) -> list[tuple[int, Text]]:
        """One token for every row; the sentences (by number) that have ended."""
        memory, backbone = self.memory, self.engine.backbone
        memory.make_room()
        bias = backbone.decoder_bias(memory.length + 1)
        token = Token(self, backbone.embed_texts(self.search.tokens[:, -1:], memory.length).squeeze(1))
        for block in self.engine.blocks:
            if block.number and self.listens:
                token.ask(block.number)
            if not token.count:
                break
            if (new := block.project_source(memory, token.rows, self.source)) is not None:
                self.trace.source[self.ids, block.number] += new * self.source.lengths
            missing = memory.missing(block.number, token.rows)
            if missing is not None:
                self.trace.count_missing(block.number, token.sentences[missing[0]])
            token.x = block(token.x, token.count, memory, token.rows, missing, bias)
        logits = token.answers()
        self.trace.count(token.sentences, token.exits, memory.length)
        memory.length += 1
        return self._follow(self.search.advance(logits, token.exits))

    def _follow(self, advance: Advance) -> list[tuple[int, Text]]:
        """Reorder what is kept, and let the sentences go that have ended."""
        rows, stay, memory = advance.rows, advance.stay, self.memory
        ended = [(int(self.ids[index]), text) for index, text in advance.ended]
        if stay is not None:
            offsets = torch.arange(self.beams, device=stay.device)
            staying = (stay.unsqueeze(1) * self.beams + offsets).flatten()
            rows = staying if rows is None else rows[staying]
            memory.take_sources(stay)
            self.keep(self.ids[stay], self.dials[stay])
            self.means = None if self.means is None else self.means[stay]
            if not memory.sources_ready:
                self.source = self.source.take(stay)
        if rows is not None and not torch.equal(rows, torch.arange(memory.n_rows, device=rows.device)):
            memory.take(rows)
        return ended


class Token:
    """The rows of one step on their way through the blocks."""

    def __init__(self, writing: Writing, x: Tensor) -> None:
        self.writing, self.n_rows, self.count = writing, len(x), len(x)
        self.x = fill(x, x.new_empty(few(len(x)), 0))
        """[M, d]: the live rows, and a few more that nobody reads."""
        self.rows: Tensor | None = None
        """[R'] which rows are live; None: all."""
        self.sentences, self.dials = writing.sentences, writing.row_dials
        """[R] the number of each row's sentence, and its dial."""
        self.exits = torch.full((self.n_rows,), writing.engine.backbone.n_blocks, device=x.device)
        """[R] the block at which each row left."""
        self.left: Tensor | None = None  # [R, d] the states they left with
        self.logits: Tensor | None = None  # [R, V], where a decider has asked for them and the row then left
        self.answered: Tensor | None = None  # [R]
        self.notes: dict[Hashable, Notes] = {}

    def ask(self, block: int) -> None:
        """Let the decider say which rows go no further than the blocks below `block` (from 0)."""
        writing, live, count = self.writing, self.x[: self.count], self.count
        rows, ids, dials = writing.numbers[:count], self.sentences, self.dials
        if self.rows is not None:
            rows = self.rows
            ids, dials = ids.index_select(0, rows), dials.index_select(0, rows)
        seen: list[Tensor] = []

        def exit_logits() -> Tensor:
            if not seen:
                seen.append(writing.engine.logits(live))
                writing.trace.count_heads(ids)
            return seen[0]

        def source() -> Tensor:
            assert writing.means is not None
            return writing.means[rows // writing.beams]

        here, nothing = writing.memory.length, writing.zeros[:count]
        false = nothing.bool()
        state = State(
            layer=block + 1, point="before", stack="decoder", step=here, rows=live, sequence=writing.numbers[:count],
            position=nothing + here, frozen=false, protected=false, ids=ids, row_ids=rows, dial=dials,
            lengths=nothing + 1, spent=nothing, notes=self.notes,
            providers={"exit_logits": exit_logits, "source": source},
        )  # fmt: skip
        decision = ask(writing.decider, state)
        if state.spent is not nothing:
            writing.trace.decider_macs.index_add_(0, ids, state.spent)
        decision.check(state, soft=False)
        if other := sorted(set(decision.said) - {"freeze"}):
            raise StrettoError(f"Expected 'freeze' in a decoder, got {', '.join(other)}. A token there can only leave.")
        if decision.freeze is not None and bool(decision.freeze.any()):
            self._leave(block, rows, decision.freeze, seen[0] if seen else None)

    def _leave(self, block: int, rows: Tensor, leaving: Tensor, logits: Tensor | None) -> None:
        live, gone = self.x[: self.count], rows[leaving]
        states = live[leaving]
        self.exits[gone] = block
        if self.left is None:
            self.left = live.new_empty(self.n_rows, live.shape[1])
            self.answered = torch.zeros_like(self.exits, dtype=torch.bool)
        assert self.answered is not None
        self.left[gone] = states
        self.writing.memory.keep_state(gone, states)
        if logits is not None:
            if self.logits is None:
                self.logits = logits.new_empty(self.n_rows, logits.shape[1])
            self.logits[gone], self.answered[gone] = logits[leaving], True
        stay = (~leaving).nonzero().squeeze(1)
        self.rows, self.count = rows[stay], len(stay)
        self.x = fill(live[stay], live.new_empty(few(len(stay)), 0))
        self.notes = {
            who: Notes(taken(notes.sequences, stay), taken(notes.rows, stay)) for who, notes in self.notes.items()
        }

    def answers(self) -> Tensor:
        """[R, V]: what the output head says to the states the rows left with. One product for all not yet answered."""
        engine, trace, live = self.writing.engine, self.writing.trace, self.x[: self.count]
        if self.left is None:
            trace.count_heads(self.sentences)
            return engine.logits(live)
        assert self.answered is not None
        if self.count:
            self.left[self.rows] = live
        if self.logits is None:
            trace.count_heads(self.sentences)
            return engine.logits(self.left)
        rest = (~self.answered).nonzero().squeeze(1)
        if len(rest):
            trace.count_heads(self.sentences[rest])
            self.logits[rest] = engine.logits(self.left[rest])
        return self.logits

"""What a decoder executed, and its FLOPs.

Per sentence and block, in multiply-adds (d hidden size, w width of all heads, f size of the FFN):

    tokens · (4 d w + 2 d f)           own query and output; query and output of the attention to the source; FFN
    + projected · 2 d w                own keys and values: of tokens that entered the block, and of those that had
                                       left below it
    + source · 2 d w                   keys and values of the source, once
    + 2 w (pairs + tokens · n_source)  scores and weighted sums, own and to the source

and the output head, d V for every state it read. The multiply-adds of deciders are added. FLOPs are twice the
multiply-adds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.backbones.decoder import EncoderDecoder
from stretto.engine.written import DecoderTrace


def decoder_flops(trace: DecoderTrace, backbone: EncoderDecoder) -> Tensor:
    """[S] FLOPs executed for each sentence by the decoder, its deciders and the output head."""
    specs, device = backbone.block_specs, trace.tokens.device
    token, key, source, own, cross = torch.tensor(
        [(s.token_macs, s.key_macs, s.source_macs, 2 * s.attention.width, 2 * s.cross.width) for s in specs],
        device=device,
    ).unbind(dim=1)  # [N] each
    blocks = token * trace.tokens + key * trace.projected + source * trace.source
    attention = own * trace.pairs + cross * trace.tokens * trace.lengths.unsqueeze(1)
    head = trace.heads * backbone.lm_head.weight.numel()
    return 2 * ((blocks + attention).sum(dim=1) + head + trace.decider_macs)

"""Stacks of layers."""

from favor_keras.models.causal_lm import CausalLM
from favor_keras.models.decoder_block import DecoderBlock

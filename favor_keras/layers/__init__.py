"""Keras layers: weights, masks, caches and configs around the mathematics of `favor_keras.ops`."""

from favor_keras.layers.fast_weights_attention import FastWeightsAttention
from favor_keras.layers.favor_attention import FavorAttention, SelfAttention
from favor_keras.layers.gmlp_block import GMLPBlock
from favor_keras.layers.short_convolution import ShortConvolution
from favor_keras.layers.softmax_attention import SoftmaxAttention
from favor_keras.layers.spatial_gating_unit import SpatialGatingUnit

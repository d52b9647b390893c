"""Functions on tensors: projections, kernels, scans and attention, without weights."""

from favor_keras.ops.attention import (
    causal_denominator,
    causal_numerator,
    favor_attention,
    noncausal_denominator,
    noncausal_numerator,
)
from favor_keras.ops.causal_convolution import causal_convolution
from favor_keras.ops.chunk_scan import scan_chunks
from favor_keras.ops.delta_rule import delta_rule
from favor_keras.ops.dpfp import dpfp
from favor_keras.ops.factories import make_fast_generalized_attention, make_fast_softmax_attention
from favor_keras.ops.kernels import (
    DPFPKernel,
    EluKernel,
    GeneralizedKernel,
    HyperbolicSoftmaxKernel,
    KernelTransformation,
    ReluKernel,
    SoftmaxKernel,
    TrigonometricSoftmaxKernel,
    get_kernel,
    relu_kernel_transformation,
    softmax_kernel_transformation,
)
from favor_keras.ops.linear_attention import linear_attention
from favor_keras.ops.projections import create_projection_matrix
from favor_keras.ops.spatial_gating import spatial_gating

"""Operators without a row in the table that a stored graph may have.

Each only computes: it changes no argument, opens no file, and its results are as large as
its arguments together, or as a size among its arguments says. None loops as often as a number
says. Models may use any other operator; they are traced again each time.
"""

_OF_EACH_VALUE = """
__and__ __lshift__ __or__ __rshift__ __xor__ absolute acos acosh addcdiv angle
arccos arcsin arctan arctan2 asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor clamp_max clip copysign cosh deg2rad
digamma divide eq erfc erfinv exp2 float_power fmax fmin ge greater greater_equal gt
hardshrink heaviside hypot i0 isclose isfinite isinf isnan isneginf isposinf ldexp le less
less_equal lgamma log10 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
logit lt multiply nan_to_num ne negative nextafter not_equal positive rad2deg sgn sign
signbit sinh softshrink special_entr special_erf special_erfc special_erfinv special_exp2
special_expit special_expm1 special_i0 special_i0e special_i1 special_i1e special_log1p
special_log_softmax special_logit special_ndtr special_round special_softmax special_xlogy
subtract true_divide xlogy
"""
_REDUCTIONS = """
all aminmax any argmax argmin count_nonzero cummax cummin cumprod frobenius_norm kthvalue
linalg_matrix_norm linalg_norm logcumsumexp logsumexp mode nanmean nanmedian nanquantile
nansum quantile special_logsumexp std_mean trace
"""
_PRODUCTS = """
addbmm addmv addr cdist cosine_similarity cross dist dot ger inner linalg_cross
linalg_matmul linalg_vecdot mv outer pairwise_distance tensordot vdot
"""
_OF_MATRICES = """
det inverse linalg_cholesky linalg_det linalg_eigh linalg_inv linalg_pinv linalg_qr
linalg_slogdet linalg_solve linalg_solve_triangular linalg_svd logdet
"""
_OF_COMPLEX_NUMBERS = """
complex conj conj_physical fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft
fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_irfft fft_irfft2 fft_irfftn fft_rfft
fft_rfft2 fft_rfftfreq fft_rfftn imag istft real resolve_conj resolve_neg stft
view_as_complex view_as_real
"""
_MOVES = """
_weight_norm affine_grid_generator alias constant_pad_nd diag diff hamming_window
hann_window isin lift_fresh_copy msort reflection_pad1d reflection_pad2d reflection_pad3d
replication_pad1d replication_pad2d replication_pad3d row_stack unsafe_chunk unsafe_split
unsafe_split_with_sizes
"""
_RANDOM_NUMBERS = "bernoulli rand rand_like randint randint_like randn randn_like"
FUNCTIONAL = frozenset(
    " ".join(
        (
            *(_OF_EACH_VALUE, _REDUCTIONS, _PRODUCTS, _OF_MATRICES),
            *(_OF_COMPLEX_NUMBERS, _MOVES, _RANDOM_NUMBERS),
        )
    ).split()
)
"""The packets of these operators."""
SIZED_BY_VALUES = frozenset(
    {
        "aten.repeat_interleave.Tensor",
        "aten.repeat_interleave.self_Tensor",
        "aten.tensor_split.tensor_indices_or_sections",
    }
)
"""Operators whose results are as large as the values of an argument say. No stored graph may
have them.
"""

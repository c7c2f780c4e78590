"""Values of a layer and its calls that all templates use, and the constants of written modules."""

from mha_spec import (
    DynamicScaling,
    GridBias,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RelativeProducts,
    SinusoidProducts,
    YarnScaling,
)
from parity.explain.writing.subject import ABSENT, call, spec

latent, rope, alibi, relative = spec.latent, spec.rope, spec.alibi, spec.relative_bias
grid = relative if isinstance(relative, GridBias) else None
qk_norm, v_norm, temperature, gate = spec.qk_norm, spec.v_norm, spec.temperature, spec.gate
context_norm = spec.context_norm
products = spec.relative_products if isinstance(spec.relative_products, RelativeProducts) else None
sinusoids = spec.relative_products if isinstance(spec.relative_products, SinusoidProducts) else None
scaling = None if rope is None else rope.scaling
ramp = (0, 1) if not isinstance(scaling, YarnScaling) else scaling.ramp(rope.theta, rope.rotary_dim or spec.head_dim)
is_partial = rope is not None and rope.rotary_dim not in (None, spec.head_dim) and latent is None
has_own_qk_norm = qk_norm is not None and (
    qk_norm.weight == "1+w" or qk_norm.per_head or (qk_norm.kind == "rms" and qk_norm.bias)
)
has_own_v_norm = v_norm is not None and (
    v_norm.weight == "1+w" or v_norm.per_head or (v_norm.kind == "rms" and v_norm.bias)
)
has_own_context_norm = context_norm is not None and (
    context_norm.weight == "1+w" or (context_norm.kind == "rms" and context_norm.bias)
)
has_distances = spec.has_distance_bias
appends = call.cache is not None and not spec.shared_kv
needs_positions = call.cache is not None or spec.span is not None or has_distances
is_explicit = spec.soft_cap is not None or spec.sinks or has_distances or call.has_bias
may_hide_all = call.has_mask or ((call.is_cross or (spec.shared_kv and call.cache is None)) and spec.span is not None)
norms = [norm for norm in (qk_norm, v_norm) if norm is not None]
has_wide = spec.clip_qkv is not None or any(norm.over == "width" for norm in norms)
is_plain_scale = spec.score_scale == spec.head_dim**-0.5
groups = spec.num_heads // spec.num_kv_heads
biases = {projection.has_bias for projection in spec.projections.values()}
has_biases = "some" if len(biases) > 1 else "all" if True in biases else "none"

D_MODEL = spec.d_model
D_IN = D_MODEL if spec.d_in == spec.d_model else spec.d_in
D_KV = D_IN if spec.d_kv == spec.d_in else spec.d_kv
NUM_HEADS = spec.num_heads
NUM_KV_HEADS = NUM_HEADS if spec.num_kv_heads == spec.num_heads else spec.num_kv_heads
HEAD_DIM = spec.head_dim
VALUE_HEAD_DIM = HEAD_DIM if spec.value_head_dim == spec.head_dim else spec.value_head_dim
if latent is not None:
    Q_RANK = latent.q_rank
    KV_RANK = latent.kv_rank
    ROPE_DIM = latent.rope_dim  # last features of a key, which all heads share
    OWN_DIM = HEAD_DIM - ROPE_DIM
    LATENT_EPS = latent.eps
    Q_FACTOR = latent.q_factor
    KV_FACTOR = latent.kv_factor
if is_plain_scale:
    SCALE = HEAD_DIM**-0.5
else:
    SCALE = spec.score_scale
if spec.soft_cap is not None:
    SOFT_CAP = spec.soft_cap
if spec.clip_qkv is not None:
    CLIP = spec.clip_qkv
if spec.window_size is not None:
    WINDOW = spec.window_size
if spec.chunk_size is not None:
    CHUNK = spec.chunk_size
if alibi is not None:
    SLOPES = spec.alibi_slopes  # of each head, per token of distance
if relative is not None:
    NUM_BUCKETS = relative.num_buckets
if relative is not None and grid is None:
    MAX_DISTANCE = relative.max_distance
if grid is not None:
    GRID_HEIGHT = grid.height
    GRID_WIDTH = grid.width
if sinusoids is not None:
    SINUSOID_THETA = sinusoids.theta
if products is not None:
    NUM_BEFORE = products.num_before  # rows of vectors for keys before the query
    NUM_AFTER = products.num_after
    if products.num_exact is not None:
        NUM_EXACT = products.num_exact  # distances up to this one have rows of their own
        STEPS = products.first_distances  # from which on farther distances share the next row
if temperature is not None:
    TEMPERATURE_LENGTH = temperature.length
    TEMPERATURE_SCALE = temperature.scale
    FIRST_POSITION = temperature.first_position
if qk_norm is not None:
    QK_EPS = qk_norm.eps
if v_norm is not None:
    V_EPS = QK_EPS if qk_norm is not None and qk_norm.eps == v_norm.eps else v_norm.eps
if context_norm is not None:
    CONTEXT_EPS = context_norm.eps
if spec.dropout:
    DROPOUT = spec.dropout
if rope is not None:
    ROTARY_DIM = ROPE_DIM if latent is not None else HEAD_DIM if rope.rotary_dim is None else rope.rotary_dim
    THETA = rope.theta
    if rope.sections is not None and call.has_positions:
        AXES = tuple(int(axis) for axis in rope.axes(spec.head_dim))  # position axis of each pair
    if rope.section_frequencies != "shared":
        EXPONENTS = tuple(float(each) for each in rope.exponents(spec.head_dim))  # exponent of THETA for each pair
    if rope.attention_factor != 1.0:
        ATTENTION_FACTOR = rope.attention_factor
    if isinstance(scaling, YarnScaling):
        RAMP_BEGIN = ramp[0]  # up to this pair, frequencies are unchanged
        RAMP_END = ramp[1]  # from this pair on, they are fully scaled
    if isinstance(scaling, LongRopeScaling):
        SHORT_FACTORS = scaling.short_factors
        LONG_FACTORS = scaling.long_factors

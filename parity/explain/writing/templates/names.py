"""Values of a layer and its calls that all templates use, and the constants of written modules."""

from mha_spec import (
    GridBias,
    Llama3Scaling,
    LongRopeScaling,
    RelativeProducts,
    SinusoidProducts,
    YarnScaling,
)
from parity.explain.writing.subject import call, spec

latent = spec.latent
rope = spec.rope
alibi = spec.alibi
relative = spec.relative_bias
temperature = spec.temperature
gate = spec.gate
qk_norm = spec.qk_norm
v_norm = spec.v_norm
context_norm = spec.context_norm

grid = None
if isinstance(relative, GridBias):
    grid = relative
products = None
if isinstance(spec.relative_products, RelativeProducts):
    products = spec.relative_products
sinusoids = None
if isinstance(spec.relative_products, SinusoidProducts):
    sinusoids = spec.relative_products

qk_norm_of = None
if qk_norm is not None:
    qk_norm_of = qk_norm.over  # width or head
    if qk_norm.after_rope:
        qk_norm_of = "rotated head"
scaling = None
if rope is not None:
    scaling = rope.scaling
if isinstance(scaling, Llama3Scaling):
    low_turns = scaling.low_freq_factor
    high_turns = scaling.high_freq_factor
v_norm_of = None
if v_norm is not None:
    v_norm_of = v_norm.over

is_partial = rope is not None and rope.rotary_dim not in (None, spec.head_dim) and latent is None
appends = call.cache is not None and not spec.shared_kv
takes_other_kv = call.cache is None and spec.shared_kv
has_distances = spec.has_distance_bias
needs_positions = call.cache is not None or spec.span is not None or has_distances
is_explicit = spec.soft_cap is not None or spec.sinks or has_distances or call.has_bias
may_hide_all = call.has_mask or (spec.span is not None and (call.is_cross or takes_other_kv))
groups = spec.num_heads // spec.num_kv_heads
has_own_scale = spec.score_scale != spec.head_dim**-0.5
biases = {projection.has_bias for projection in spec.projections.values()}
if products is not None and products.per_head:
    query_products = "bnth,cnh->bntc"
    key_products = "bnsh,cnh->bnsc"
elif products is not None:
    query_products = "bnth,ch->bntc"
    key_products = "bnsh,ch->bnsc"

D_MODEL = spec.d_model
if spec.d_in == spec.d_model:
    D_IN = D_MODEL
else:
    D_IN = spec.d_in
if spec.d_kv == spec.d_in:
    D_KV = D_IN
else:
    D_KV = spec.d_kv
NUM_HEADS = spec.num_heads
if spec.num_kv_heads == spec.num_heads:
    NUM_KV_HEADS = NUM_HEADS
else:
    NUM_KV_HEADS = spec.num_kv_heads
HEAD_DIM = spec.head_dim
if spec.value_head_dim == spec.head_dim:
    VALUE_HEAD_DIM = HEAD_DIM
else:
    VALUE_HEAD_DIM = spec.value_head_dim
if latent is not None:
    Q_RANK = latent.q_rank
    KV_RANK = latent.kv_rank
    ROPE_DIM = latent.rope_dim  # last features of a key, which all heads share
    OWN_DIM = HEAD_DIM - ROPE_DIM
    LATENT_EPS = latent.eps
    Q_FACTOR = latent.q_factor
    KV_FACTOR = latent.kv_factor
if has_own_scale:
    SCALE = spec.score_scale
else:
    SCALE = HEAD_DIM**-0.5
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
    V_EPS = v_norm.eps
if context_norm is not None:
    CONTEXT_EPS = context_norm.eps
if spec.dropout:
    DROPOUT = spec.dropout
if rope is not None:
    if latent is not None:
        ROTARY_DIM = ROPE_DIM
    elif is_partial:
        ROTARY_DIM = rope.rotary_dim
    else:
        ROTARY_DIM = HEAD_DIM
    THETA = rope.theta
    if rope.sections is not None and call.has_positions:
        AXES = tuple(int(axis) for axis in rope.axes(spec.head_dim))  # position axis of each pair
    if rope.section_frequencies != "shared":
        # Exponents of THETA, one for each pair.
        EXPONENTS = tuple(float(exponent) for exponent in rope.exponents(spec.head_dim))
    if rope.attention_factor != 1.0:
        ATTENTION_FACTOR = rope.attention_factor
    if isinstance(scaling, YarnScaling):
        # Up to the first pair, frequencies are unchanged; from the last one on, fully scaled.
        RAMP_BEGIN = scaling.ramp(rope.theta, rope.rotary_dim or spec.head_dim)[0]
        RAMP_END = scaling.ramp(rope.theta, rope.rotary_dim or spec.head_dim)[1]
    if isinstance(scaling, LongRopeScaling):
        SHORT_FACTORS = scaling.short_factors
        LONG_FACTORS = scaling.long_factors

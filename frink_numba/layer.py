"""The layer description: everything a backend may need to know of one transformer layer (R4, R5, R14 to R18).

Fields hold what a model asks for, whether or not any backend serves it. A backend classifies every field as served,
consumed or a reason to decline (R16): an unknown field is a reason. `None`, False, 0 or an empty tuple means absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from frink_numba.quant import QuantMatrix


class RopeLayout(Enum):
    """Which channels of a head turn together: NORM pairs (2i, 2i+1), NEOX pairs (i, i + rot_dim/2)."""

    NORM = "norm"
    NEOX = "neox"


class Activation(Enum):
    """The FFN's activation. The gated ones compute act(gate x) * (up x)."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"  # tanh approximation of GELU
    GEGLU_ERF = "geglu_erf"  # exact GELU
    REGLU_SQUARED = "reglu_squared"


class TokenMixer(Enum):
    """What mixes tokens in this layer."""

    ATTENTION = "attention"
    SHORT_CONVOLUTION = "short convolution"
    STATE_SPACE = "state space"


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary position embedding of one layer (R17).

    Channel pair i of the first `rot_dim` channels turns by pos * theta**(-2i/rot_dim) / freq_factors[i]; the turned
    channels of Q and K are multiplied by `magnitude_scale`. Linear scaling by s is freq_factors = s.
    """

    theta: float
    rot_dim: int
    layout: RopeLayout
    freq_factors: np.ndarray | None = None  # float32 [rot_dim/2]
    magnitude_scale: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class AttentionSpec:
    """Causal grouped-query attention. Vectors are float32; widths: Q n_heads*head_dim, K and V n_kv_heads*head_dim."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    q: QuantMatrix  # [n_heads*head_dim, hidden]
    k: QuantMatrix  # [n_kv_heads*head_dim, hidden]
    v: QuantMatrix  # [n_kv_heads*head_dim, hidden]
    o: QuantMatrix  # [hidden, n_heads*head_dim]
    rope: Rope | None = None
    q_bias: np.ndarray | None = None
    k_bias: np.ndarray | None = None
    v_bias: np.ndarray | None = None
    q_norm: np.ndarray | None = None  # RMS weight: [head_dim] per head, [heads*head_dim] whole, [heads, head_dim] rows
    k_norm: np.ndarray | None = None
    qk_norm_after_rope: bool = False
    window: int = 0  # key j is visible to query i iff 0 <= i - j < window; 0: all of them
    softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: none
    scale: float | None = None  # None: 1/sqrt(head_dim)
    sinks: np.ndarray | None = None  # float32 [n_heads]: an extra logit per head that takes weight and gives no value
    output_gate: QuantMatrix | None = None  # sigmoid(gate x) on the value sum
    interleaved_q_gate: bool = False  # q's rows hold query and gate, head by head
    value_norm: np.ndarray | None = None  # RMS weight between the value sum and o
    o_bias: np.ndarray | None = None
    o_scale: np.ndarray | None = None  # after o


@dataclass(frozen=True, slots=True, eq=False)
class Expert:
    """One feed-forward body: down(act(gate x) * (up x))."""

    gate: QuantMatrix  # [ffn, hidden]
    up: QuantMatrix  # [ffn, hidden]
    down: QuantMatrix  # [hidden, ffn]
    gate_bias: np.ndarray | None = None
    up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None
    down_scale: np.ndarray | None = None
    resident: bool = True  # False: its bytes are not in memory yet


@dataclass(frozen=True, slots=True, eq=False)
class FeedForward:
    """The FFN of a layer: one expert is a dense layer; more need a router.

    A router weighs the experts of each token by softmax(router x). The `n_experts_used` heaviest are summed by their
    weights, which `normalized_weights` first divides by their sum.
    """

    activation: Activation
    experts: tuple[Expert, ...]
    router: QuantMatrix | None = None  # [experts, hidden]
    n_experts_used: int = 1
    normalized_weights: bool = False
    shared: Expert | None = None  # added for every token, beside the experts chosen
    shared_gate: np.ndarray | None = None  # float32 [hidden]: sigmoid(shared_gate . x) on what `shared` gives


@dataclass(frozen=True, slots=True, eq=False)
class Lora:
    """A low-rank update of one projection: W x becomes W x + scale * up (down x), before the projection's bias."""

    target: str  # the projection's name in AttentionSpec or Expert: "q", "k", "v", "o", "gate", "up" or "down"
    down: np.ndarray  # float32 [rank, cols of the projection]
    up: np.ndarray  # float32 [rows of the projection, rank]
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One transformer layer over a hidden batch float32 [batch, hidden].

    x += residual_scale * post_attn_norm(attention(attn_norm(x)))
    x += residual_scale * post_ffn_norm(ffn(ffn_norm(x)))

    Norms are RMS norms; one that is None is left out.
    """

    attn_norm: np.ndarray | None  # float32 [hidden]
    attention: AttentionSpec
    ffn_norm: np.ndarray | None  # float32 [hidden]
    ffn: FeedForward
    norm_eps: float
    post_attn_norm: np.ndarray | None = None
    post_ffn_norm: np.ndarray | None = None
    post_norm_eps: float | None = None  # None: norm_eps
    mixer: TokenMixer = TokenMixer.ATTENTION
    lora: tuple[Lora, ...] = ()
    residual_scale: float = 1.0

    @property
    def hidden_dim(self) -> int:
        return self.attention.q.cols if self.attn_norm is None else int(self.attn_norm.shape[0])

"""The 256M hybrid language model and its small relatives.

    x   = rmsnorm(embedding[token])
    x  += factor * mixer(norm(x));   x += factor * mlp(norm(x))          factor = min(1, base_depth / layers)
    nats = cross-entropy( softcap * tanh( head(norm(x)) / softcap ) )

Layers follow `pattern`; a "global" layer is softmax attention over the whole segment, a "local" one is the arm `local` names.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dwslm.model.attention import Attention
from dwslm.model.block import Block, DepthQuery, DepthStream, FusedDepthStream, PlainStream, Stream
from dwslm.model.delta import DeltaAttention
from dwslm.model.init import initialize
from dwslm.model.mlp import MLP
from dwslm.model.peaks import KeepsPeaks
from dwslm.model.projection import Norm, OutputBlock, Projection, Table
from dwslm.model.rotary import RopeSettings, Rotary, attention_scale, rotation_frequencies
from dwslm.model.value_embedding import ValueEmbedding
from dwslm.ops import add_norm, delta_gate, depth_mix, fp8, loss_head, mlp, qk_norm_rope, short_conv
from dwslm.ops import attention as attention_op
from dwslm.ops import delta_rule as delta_rule_op
from dwslm.ops.depth_mix.keys import reader_keys
from dwslm.ops.loss_head import token_nats, total_nats, total_nats_delayed
from dwslm.ops.norm import rms_norm
from dwslm.ops.segments import segments

LOCAL = ("kda", "gdn", "window")
VALUE_EMBEDDINGS = ("none", "global", "alternating")
SIZES = (
    "width",
    "heads",
    "kv_heads",
    "head_dim",
    "window",
    "delta_heads",
    "delta_head_dim",
    "delta_gate_rank",
    "mlp_hidden",
)
MOST_LAYERS, MOST_SIZE = 1024, 2**18  # far more than is ever wanted, and still few enough to count with
MOST_SOFTCAP = 40.0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class ModelSettings:
    """Shape and parts of the model. The defaults are the 256M main model."""

    layers: int = 20
    """Number of layers, each a mixer and an MLP."""
    width: int = 1024
    """Size of the residual stream."""
    pattern: list[str] = field(default_factory=lambda: ["local", "local", "local", "global"])
    """Kinds of layer, "local" or "global", repeated over the depth; its length must divide `layers`."""
    local: str = "kda"
    """What a local layer is: "kda" (Kimi Delta Attention), "gdn" (Gated DeltaNet) or "window" (sliding-window attention)."""
    heads: int = 8
    """Query heads of a softmax-attention layer."""
    kv_heads: int = 2
    """Key-value heads of a softmax-attention layer; must divide `heads`."""
    head_dim: int = 128
    """Width of an attention head."""
    window: int = 512
    """Tokens that a query of the window arm sees, itself included."""
    delta_heads: int = 8
    """Heads of a linear-attention layer."""
    delta_head_dim: int = 128
    """Key and value width of a linear-attention head."""
    delta_gate: str = "bounded"
    """Form of the decay gate: "bounded" (log decay of -5 or more, what fast kernels need) or "softplus"."""
    delta_gate_rank: int = 128
    """Rank of the decay and output gates of "kda"; "gdn" has full ones."""
    mlp_hidden: int = 4096
    """Hidden width of the MLP."""
    mlp_precision: str = "model"
    """"model" multiplies in the compute dtype; "fp8" in float8_e4m3 with one scale per row, the weights' gradients apart;
    "fp8_delayed" does all products in float8_e4m3, one scale per tensor, from its peak in the micro-batch before."""
    projection_precision: str = "model"
    """Of the mixers' input and output projections: "model" multiplies in the compute dtype, "fp8_delayed" in float8_e4m3 as the
    MLP's does. What takes KDA's gates out of their low rank stays in the compute dtype."""
    head_precision: str = "model"
    """Of the loss head: "model" multiplies in the compute dtype, "fp8_delayed" in float8 in training. Scores are taken in the
    compute dtype."""
    value_embeddings: str = "global"
    """Layers with a value embedding: "none", "global" (the global layers), or "alternating" (every second layer)."""
    depth_block: int = 8
    """Sublayers in a block of the attention residuals; 0 turns them off. Must divide 2 x layers."""
    base_depth: int = 8
    """Sublayer outputs are scaled by min(1, base_depth / layers); 0 turns the scaling off."""
    init_scale: float = 0.5
    """Standard deviation of a matrix at the start, times sqrt(fan_in)."""
    softcap: float = 20.0
    """Bound on the logits, at most 40."""
    norm_eps: float = 1e-6
    """Added to the mean square in every RMSNorm; KDA's head norm needs 1e-6 or less."""
    dtype: str = "bfloat16"
    """Dtype of activations and of the matrices' compute copies: "bfloat16" or "float32". Masters are always float32."""
    attention_engine: str = "auto"
    """Kernel of softmax attention: "cudnn", "flash", "flash4", "flash_attn", "flex", "torch", or "auto", the fastest that
    fits."""
    delta_engine: str = "auto"
    """Kernel of the delta rule: "fused" (Gluon), "cudnn", "fla", "torch", "fla_gdn" (for "gdn" only), or "auto", the fastest
    that fits."""
    qk_norm_engine: str = "auto"
    """Kernel of QK-norm and rotary positions: "fused" (Triton), "torch", or "auto", which is "fused" on a GPU."""
    conv_engine: str = "auto"
    """Kernel of the short convolution: "fused" (Triton), "torch", or "auto", which is "fused" on a GPU."""
    gate_engine: str = "auto"
    """Kernels of KDA's decay gate and gated output norm: "fused" (Triton), "torch", or "auto", which is "fused" on a GPU."""
    mlp_engine: str = "auto"
    """"fused" has the squared ReLU inside the products (a Hopper GPU), and for `mlp_precision` fp8_delayed its rounding; "torch"
    has them apart; or "auto": "fused" where that fits. fp8 has one engine."""
    norm_engine: str = "auto"
    """Kernel of the residual stream's addition and norm, where there are no attention residuals: "fused" (Triton), "torch", or
    "auto", which is "fused" on a GPU."""
    depth_engine: str = "auto"
    """Kernel of the attention residuals: "fused" (Triton), "torch", or "auto", which is "fused" on a GPU."""
    head_engine: str = "auto"
    """Kernel of the loss head: "fused" (Triton), "compiled", "torch", or "auto", which is "fused" on a GPU."""
    rope: RopeSettings = field(default_factory=RopeSettings)
    """Rotary positions."""

    def __post_init__(self) -> None:
        choices = {
            "local": (self.local, LOCAL),
            "delta_gate": (self.delta_gate, ("bounded", "softplus")),
            "mlp_precision": (self.mlp_precision, mlp.PRECISIONS),
            "projection_precision": (self.projection_precision, fp8.PRECISIONS),
            "head_precision": (self.head_precision, loss_head.PRECISIONS),
            "value_embeddings": (self.value_embeddings, VALUE_EMBEDDINGS),
            "dtype": (self.dtype, tuple(DTYPES)),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise ValueError(f"model.{name}={value!r} is not one of {', '.join(allowed)}")
        if not self.pattern or set(self.pattern) - {"local", "global"}:
            raise ValueError(f"model.pattern={self.pattern} may hold only 'local' and 'global'")
        if not 1 <= self.layers <= MOST_LAYERS:
            raise ValueError(f"model.layers={self.layers} must be from 1 to {MOST_LAYERS}")
        if self.layers % len(self.pattern):
            raise ValueError(
                f"model.layers={self.layers} is not a multiple of the pattern's length {len(self.pattern)}: change one of them"
            )
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be 1 or more")
            if name != "window" and getattr(self, name) > MOST_SIZE:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at most {MOST_SIZE}")
        for name in ("depth_block", "base_depth"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name}={getattr(self, name)} must be 0 (off) or more")
        for name in ("init_scale", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"model.{name}={getattr(self, name)} must be above 0 and finite")
        if not 0 < self.softcap <= MOST_SOFTCAP:
            raise ValueError(
                f"model.softcap={self.softcap} must be above 0 and at most {MOST_SOFTCAP:g}: the loss relies on exp(-2 x "
                "softcap) being a number"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}")
        if self.depth_block and (2 * self.layers) % self.depth_block:
            raise ValueError(
                f"model.depth_block={self.depth_block} does not divide the {2 * self.layers} sublayers of {self.layers} layers"
            )
        if self.norm_eps > 1e-6 and self.local != "window":
            raise ValueError(
                f"model.norm_eps={self.norm_eps} is too large for the head norm of {self.local}, whose input has a mean "
                "square of a few 1e-6: at most 1e-6"
            )
        if self.gate_engine == "fused" and (self.local, self.delta_gate) != ("kda", "bounded"):
            raise ValueError(
                f"model.gate_engine=fused is for model.local=kda with model.delta_gate=bounded, not for {self.local} with "
                f"{self.delta_gate}: choose auto or torch"
            )
        if self.head_dim % 2:
            raise ValueError(f"model.head_dim={self.head_dim} must be even: rotary positions turn pairs")
        attention_op.check_name(self.attention_engine)
        delta_rule_op.check_name(self.delta_engine)
        qk_norm_rope.check_name(self.qk_norm_engine)
        short_conv.check_name(self.conv_engine)
        delta_gate.check_name(self.gate_engine)
        add_norm.check_name(self.norm_engine)
        mlp.check_name(self.mlp_engine)
        if self.mlp_engine == "fused" and self.mlp_precision == "fp8":
            raise ValueError(
                "model.mlp_engine=fused is for model.mlp_precision=model or fp8_delayed, not for fp8, whose kernels are its own: "
                "set model.mlp_engine=auto"
            )
        depth_mix.check_name(self.depth_engine)
        loss_head.check_name(self.head_engine)
        if self.head_engine != "auto" and self.head_precision != "model":
            raise ValueError(
                f"model.head_engine={self.head_engine} is for model.head_precision=model, not for {self.head_precision}, "
                "whose kernels are its own: set model.head_engine=auto"
            )

    @property
    def residual_factor(self) -> float:
        """What sublayer outputs are multiplied by."""
        return min(1.0, self.base_depth / self.layers) if self.base_depth else 1.0

    def kinds(self) -> list[str]:
        """Kind of every layer, first to last: "global", "kda", "gdn" or "window"."""
        return [self.local if k == "local" else k for k in self.pattern * (self.layers // len(self.pattern))]

    def has_value_embedding(self, layer: int) -> bool:
        """Whether `layer` (counted from 0) has a value table."""
        if self.value_embeddings == "alternating":
            return layer % 2 == (self.layers - 1) % 2
        return self.value_embeddings == "global" and self.kinds()[layer] == "global"


class LanguageModel(nn.Module):
    """Decoder-only model over packed batches; see the module's head for its equations."""

    frequencies: Tensor

    def __init__(self, settings: ModelSettings, vocab_size: int, seed: int = 0):
        """Builds and initialises the model on the CPU.

        Args:
            settings: shape and parts.
            vocab_size: entries of the tokenizer, special ones included.
            seed: of the initial weights.
        """
        super().__init__()
        self.settings, self.vocab_size, self.width = settings, vocab_size, settings.width
        s, dtype = settings, DTYPES[settings.dtype]
        factor = s.residual_factor
        self.embedding = Table(vocab_size, s.width, role="embedding")
        self.layers = nn.ModuleList()
        for layer, kind in enumerate(s.kinds()):
            table = self._value_embedding(layer, kind)
            mixer: Attention | DeltaAttention
            if kind in ("kda", "gdn"):
                mixer = DeltaAttention(
                    s.width,
                    s.delta_heads,
                    s.delta_head_dim,
                    kind=kind,
                    gate=s.delta_gate,
                    gate_rank=s.delta_gate_rank,
                    engine=s.delta_engine,
                    conv_engine=s.conv_engine,
                    gate_engine=s.gate_engine,
                    eps=s.norm_eps,
                    value_embedding=table,
                    dtype=dtype,
                    factor=factor,
                    precision=s.projection_precision,
                )
            else:
                mixer = Attention(
                    s.width,
                    s.heads,
                    s.kv_heads,
                    s.head_dim,
                    window=s.window if kind == "window" else None,
                    engine=s.attention_engine,
                    qk_norm_engine=s.qk_norm_engine,
                    eps=s.norm_eps,
                    value_embedding=table,
                    dtype=dtype,
                    factor=factor,
                    precision=s.projection_precision,
                )
            mlp = MLP(s.width, s.mlp_hidden, s.mlp_precision, dtype, factor, s.mlp_engine)
            self.layers.append(Block(mixer, mlp, s.width, s.norm_eps, depth_mix=s.depth_block > 0))
        self.final_query = DepthQuery(s.width) if s.depth_block else None
        self.final_norm = Norm(s.width, s.norm_eps)
        self.head = Projection(s.width, OutputBlock("", vocab_size, role="head"), dtype=dtype)
        if s.head_precision != "model":
            self.head.keep_peaks(len(loss_head.PEAKS))
        self.set_rope(s.rope)
        initialize(self, s.width, s.init_scale, seed)

    def _value_embedding(self, layer: int, kind: str) -> ValueEmbedding | None:
        s = self.settings
        if not s.has_value_embedding(layer):
            return None
        heads, head_dim = (s.delta_heads, s.delta_head_dim) if kind in ("kda", "gdn") else (s.kv_heads, s.head_dim)
        return ValueEmbedding(self.vocab_size, heads, head_dim)

    def set_rope(self, rope: RopeSettings) -> None:
        """Takes other rotary settings, for instance YaRN to score longer contexts than were trained. No weight changes."""
        self.rope = rope
        frequencies = rotation_frequencies(self.settings.head_dim, rope).to(self.embedding.weight.device)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.scale = attention_scale(self.settings.head_dim, rope)

    def hidden(self, tokens: Tensor, cu_seqlens: Tensor, context: int) -> Tensor:
        """Final norm's output [T, width] for tokens int64 [T] packed as `cu_seqlens` says, rows of `context`."""
        seg = segments(cu_seqlens, tokens.shape[0], context)
        rotary = Rotary(seg.positions, self.frequencies, self.scale)
        s = self.settings
        x = rms_norm(self.embedding(tokens), eps=s.norm_eps).to(DTYPES[s.dtype])
        stream: Stream = PlainStream(x, s.norm_engine)
        if s.depth_block and depth_mix.resolve(s.depth_engine, x.device) == "fused":
            stream = FusedDepthStream(s.depth_block, s.norm_eps, self.depth_keys()).with_block(x)
        elif s.depth_block:
            stream = DepthStream(s.depth_block, s.norm_eps).with_block(x)
        for layer in self.layers:
            stream = layer(stream, tokens, seg, rotary)
        return stream.last(self.final_query, self.final_norm)

    def depth_keys(self) -> Tensor:
        """Query times key gain of every reader of the attention residuals, in the order of reading: float32 [readers, width]."""
        readers = [reader for layer in self.layers for reader in (layer.mixer_query, layer.mlp_query)]
        queries: list[Tensor] = []
        gains: list[Tensor] = []
        for reader in (*readers, self.final_query):
            assert isinstance(reader, DepthQuery)
            queries.append(reader.query)
            gains.append(reader.gain)
        return reader_keys(queries, gains)

    def forward(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor, context: int) -> Tensor:
        """Sum of nats over the scored targets, float32 scalar; divide by the global count of scored targets to train.

        Args:
            tokens: int64 [T]; targets: int64 [T], -100 where nothing is scored.
            cu_seqlens: int32 [slots + 1], covering all T.
            context: row length.
        """
        return self.loss(self.hidden(tokens, cu_seqlens, context), targets)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of nats over the scored targets, float32 scalar, from the final norm's output [T, width]."""
        s = self.settings
        if self.head.peaks is not None and torch.is_grad_enabled():
            return total_nats_delayed(hidden, self.head.weight, targets, s.softcap, self.head.peaks)
        return total_nats(hidden, self.head.weight, targets, s.softcap, engine=s.head_engine)

    @torch.no_grad()
    def nats(self, tokens: Tensor, targets: Tensor, cu_seqlens: Tensor, context: int) -> Tensor:
        """-ln p(target) at each position, float32 [T], 0 where nothing is scored. Arguments as in `forward`."""
        hidden = self.hidden(tokens, cu_seqlens, context)
        return token_nats(hidden, self.head.weight, targets, self.settings.softcap)

    def note_peaks(self) -> None:
        """After each backward pass of training: what it saw becomes the scales of the next, where FP8 scales are delayed."""
        fp8.remember(list(self._peaks().values()))

    def extra_state(self) -> dict[str, Tensor]:
        """What training changes besides the parameters and a checkpoint must hold: views by name, of the storage itself."""
        return {name: peaks.detach() for name, peaks in self._peaks().items()}

    def _peaks(self) -> dict[str, Tensor]:
        keepers = [(name, module) for name, module in self.named_modules() if isinstance(module, KeepsPeaks)]
        return {f"{name}.peaks": module.peaks for name, module in keepers if module.peaks is not None}

    def roles(self) -> dict[str, list[tuple[str, int, str]]]:
        """What every parameter is, for the optimizer: name -> [(block, rows, role)], blocks in order along the first dimension.

        Roles: "matrix", "head", "embedding", "value_table", and "vector" for everything thin (gains, biases, convolutions,
        decay parameters, depth queries, per-head gates).
        """
        roles: dict[str, list[tuple[str, int, str]]] = {}
        for prefix, module in self.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                full = f"{prefix}.{name}" if prefix else name
                if isinstance(module, Projection):
                    roles[full] = [(block.name, block.rows, block.role) for block in module.blocks]
                else:
                    role = module.role if isinstance(module, Table) else "vector"
                    roles[full] = [("", parameter.shape[0], role)]
        return roles

    def sizes(self) -> dict[str, int]:
        """Parameters by group: "input table", "head", "value tables", "matrices", "rest". "256M" is a name, not their sum."""
        groups = {
            "embedding": "input table",
            "head": "head",
            "value_table": "value tables",
            "matrix": "matrices",
        }
        sizes = dict.fromkeys([*groups.values(), "rest"], 0)
        parameters = dict(self.named_parameters())
        for name, blocks in self.roles().items():
            for _, rows, role in blocks:
                sizes[groups.get(role, "rest")] += rows * parameters[name][0].numel()
        return sizes

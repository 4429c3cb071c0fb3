"""Settings of the training loop."""

import re
from dataclasses import dataclass

AUTO = "auto"
MOST_THREADS = 1024
MOST_PREFETCH = 1024
MOST_MICRO_BATCH = 2**24  # tokens
DIGITS = re.compile(r"[0-9]+(_[0-9]+)*")


@dataclass
class TrainSettings:
    """How much is trained, in what portions, on what, and what is reported when."""

    tokens: int = 23_000_000_000
    """Planned length of the run in token slots; rounded up to whole steps. Schedule and data phases are fractions of it."""
    batch_tokens: int = 524_288
    """Token slots of one optimizer step, on all ranks together."""
    micro_batch_tokens: int | str = 65_536
    """Token slots of one forward and backward pass; a step accumulates batch_tokens / micro_batch_tokens of them, dealt to the
    ranks evenly. "auto" takes the most, up to 131,072, whose counted memory fits 90 % of the smallest GPU, for which it wants
    `train.compile` and fused attention and delta rule; on a CPU the most up to 4,096."""
    seed: int = 0
    """Decides the initial weights and the order of the data."""
    device: str = "auto"
    """"auto" (the GPU if there is one, else the CPU), "cpu", "cuda" or "cuda:N"."""
    threads: int = 0
    """CPU threads of torch; 0 leaves torch's own choice. Results on a CPU are equal bit for bit only at equal threads."""
    deterministic: bool = False
    """Use deterministic algorithms throughout, so that the same run gives the same bits on a GPU too (a CPU's always are)."""
    compile: bool = False
    """Run the model and the optimizer through torch.compile. A CPU needs a C++ compiler for it."""
    record: bool | None = None
    """Replay each step as CUDA graphs, recorded when it has run once; null does where `train.compile` compiles for a GPU."""
    prefetch: int = 2
    """Steps of data that the loader keeps ready."""
    log_every: int = 10
    """Steps between two rows of metrics. Each row waits for the device once."""
    eval_every_tokens: int = 1_000_000_000
    """Score the held-out set whenever this many more tokens have been seen, after a save; 0 scores only at the end."""
    eval_documents: int | None = None
    """Held-out documents scored during training, those with the lowest hashes of their ids; null for all of them."""

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_tokens", "prefetch", "log_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"train.{name}={getattr(self, name)} must be 1 or more")
        if self.eval_documents is not None and self.eval_documents < 1:
            raise ValueError(f"train.eval_documents={self.eval_documents} must be 1 or more, or null for all documents")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"train.seed={self.seed} must be from 0 to {2**63 - 1}")
        for name in ("threads", "eval_every_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"train.{name}={getattr(self, name)} must be 0 or more")
        for name, most in (("threads", MOST_THREADS), ("prefetch", MOST_PREFETCH)):
            if getattr(self, name) > most:
                raise ValueError(f"train.{name}={getattr(self, name)} must be at most {most}")
        if self.micro_batch_tokens == AUTO:
            return
        if isinstance(self.micro_batch_tokens, str) and DIGITS.fullmatch(self.micro_batch_tokens):
            self.micro_batch_tokens = int(self.micro_batch_tokens)  # quotes are what a shell or YAML left
        if type(self.micro_batch_tokens) is not int or self.micro_batch_tokens < 1:
            raise ValueError(f"train.micro_batch_tokens={self.micro_batch_tokens!r} must be 1 or more, or auto")
        if self.micro_batch_tokens > MOST_MICRO_BATCH:
            raise ValueError(
                f"train.micro_batch_tokens={self.micro_batch_tokens} must be at most {MOST_MICRO_BATCH}: a step may be of several"
            )
        if self.batch_tokens % self.micro_batch_tokens:
            raise ValueError(
                f"train.batch_tokens={self.batch_tokens} is not a multiple of "
                f"train.micro_batch_tokens={self.micro_batch_tokens}"
            )

"""mlx-specstream: Speculative Streaming for MLX, lossless and on the user's own machine.

from mlx_specstream import load, stream_generate

model, tokenizer = load()  # the embedded default model
for response in stream_generate(model, tokenizer, "Once upon a time"):
    print(response.text, end="", flush=True)
"""

from ._version import __version__
from .accelerate import load_openblas as _load_openblas

_load_openblas()  # must come before anything that imports mlx.core

from .api import generate, stream_generate
from .decode.processors import Sampling
from .errors import SpecStreamError, UsageError
from .loading import load
from .responses import GenerationResponse
from .session import Session
from .speculation import Speculation
from .streams import StreamHeads, StreamsConfig, make_streams
from .streams.files import load_streams, save_streams
from .streams.folder import StreamSet, load_folder
from .target import Target

__all__ = [
    "GenerationResponse",
    "Sampling",
    "Session",
    "SpecStreamError",
    "Speculation",
    "StreamHeads",
    "StreamSet",
    "StreamsConfig",
    "Target",
    "UsageError",
    "__version__",
    "generate",
    "load",
    "load_folder",
    "load_streams",
    "make_streams",
    "save_streams",
    "stream_generate",
]

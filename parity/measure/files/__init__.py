"""Files of named tensors: read one by one; written atomically, verified, in bounded memory.

| format | files | read | written |
|---|---|---|---|
| safetensors | `.safetensors`, shards with an index, a folder of them | by seeking | also shards |
| torch | `.pt` `.pth` `.bin` (zip archives), shards with an index | mapped, weights only | same |
| npz | `.npz` | member by member | yes |
| msgpack | `.msgpack` as Flax writes it, with the package `msgpack` | by seeking | yes |
| orbax | a folder | tensor by tensor | yes, but all tensors are in memory |
| gguf | `.gguf`; quantized tensors as float32, with the package `gguf` | by seeking | no |

No file is trusted: incomplete or damaged ones raise a `ValueError` or `OSError` of one line, and no
content is ever executed. bfloat16 and float16 are preserved bit for bit.

Each format has a module; torch and npz are in `zipped`. Start at `reading.open_tensors` and
`writing.write_tensors`.
"""

from parity.measure.files.reading import open_tensors
from parity.measure.files.tensor_file import FileTensor, TensorFile, TensorInfo
from parity.measure.files.writing import write_tensors

__all__ = ["FileTensor", "TensorFile", "TensorInfo", "open_tensors", "write_tensors"]

"""Convert attention weights between checkpoint layouts.

- `Layout` (`layouts`): the names, packing and axes of a layer's weights in one kind of checkpoint.
- `LayerHints` (`hints`): what a call, a file's metadata and its `config.json` say about a layer,
  and which of them wins.
- `Plan` (`plan`): which tensor goes where.

Start at `convert.convert_file` for files and `convert.convert` for tensors.
"""

"""Convert attention weights between checkpoint layouts.

- `Layout` (`layouts`): the names, packing and axes of a layer's weights in one kind of checkpoint.
- `Checkpoint` (`checkpoint`): an open checkpoint. `Checkpoint.open(path)` reads tensors, own
  metadata and configuration once each. Its `layers(hints)` returns `CheckpointLayers`, whose
  `plan(layout)` returns a `Plan` (`plan`), whose `write(path)` writes the tensors of the target.
- `FileLayer` (`layers`): one layer, with its specification and the location of its weights.

Start at `convert.convert_file`, which is these four calls, or at `convert.convert` for weights in
memory.

Who knows what about a layer is decided in one place, `FileHints` (`file_hints`), in one order: the
caller, the file's own metadata (`metadata`), otherwise the configuration of its model
(`model_config`), and last the names and shapes of its tensors (`layouts.detection`).
docs/reference/conversion.md shows that order as a table. `LayerHints` (`hints`) are what one source
says about one layer.

Outside of a conversion, `inspect` lists the layers of a file, `ranks` reads and writes files
of several ranks, and `sharing` follows weights that layers share. Two sets of weights are compared
in `parity.explain.diagnosis.weights`.
"""

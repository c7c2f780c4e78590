"""Our implementations on meshes of devices: cases divided by `parallel.shard`, stage by stage, and
what their devices send each other.

- `MeshPlan` (`plan`): a mesh, and the cases that it divides.
- `MeshBackend` (`backend`): runs a case on a mesh; `jax`, `torch` and `tt` are its modules.
- `Collectives` (`collectives`): the counted and the necessary collective operations of a program.

Start at `run.run_on_mesh`; `mha-parity mesh` is its command.
"""

"""Division of a layer over ranks (devices): which rank has which rows of which weight.

- `ShardPlan` (`shard`): what each rank holds.
- `unshard_stages` (`stages`): the stages of ranks, joined.

Start at `shard.shard`.
"""

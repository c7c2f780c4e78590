"""Say why an attention layer computes something else than it should.

- `fitting`: the parameters behind an observed rotation, bias or mask.
- `diagnosis`: which known bug, or which pattern, turns the reference into the observed result.
  Start at `diagnosis.diagnose.diagnose`.
- `identification`: which specification a live model computes, by observation.
- `writing`: the source code of one layer, without this package.
- `conformance`: the conventions of an implementation, by asking it questions.
- `mutating`: whether a test suite notices known bugs.

A passing `assert_parity` or a conversion by rules imports nothing of this wing.

Bugs lie in three places: their pages in `parity/bugs`, those injected into the reference in
`diagnosis.bugs`, and those injected into a user's code in `mutating.bugs`.
"""

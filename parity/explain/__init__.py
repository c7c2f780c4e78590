"""Say why an attention layer computes something else than it should.

- `diagnosis`: which known bug, or which pattern, turns the reference into the observed result.
  Start at `diagnosis.diagnose.diagnose`.
- `identification`: which specification a live model computes, by observation.
- `writing`: the source code of one layer, without this package.
- `conformance`: the conventions of an implementation, by asking it questions.
- `mutating`: whether a test suite notices known bugs.

A passing comparison or a conversion by rules imports nothing of this wing.
"""

"""Check the conventions of an attention implementation by calling it.

For a library whose documentation does not say whether True masks, where a causal mask of unequal
lengths begins, or what an empty row returns.

- `Subject` (`subjects`): how an implementation is called.
- `Question` (`answers`): one convention, with the calls that tell its answers apart; `questions`
  has all of them.
- `Conformance` (`answers`): an answer to each question.

Start at `examine.examine`. Only `mutating`, the command line and the reports import this room.
"""

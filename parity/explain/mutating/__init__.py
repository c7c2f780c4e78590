"""Mutation testing for attention: put known bugs into a user's attention, and run the user's tests
with each.

- `View` (`view`): how the user's attention is called, with names of ours.
- `Call` (`calls`): the arguments of one call, by these names.
- `Injection` (`calls`): a known bug. It makes a `BuggyCall` from a call: the same call with other
  arguments, weights or masks, or with its output changed.
- `Run` (`run`): one run of the user's tests, with a bug or without one.
- `Outcome` (`run`): what the tests made of one bug: noticed it, passed, or never reached it.

Start at `run.mutate`. Only the command line and the reports import this room.
"""

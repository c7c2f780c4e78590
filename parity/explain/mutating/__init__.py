"""Mutation testing for attention: put known bugs into a user's attention, and run the user's tests
with each.

- `View` (`view`): how the user's attention is called, with names of ours.
- `Outcome` (`run`): what the tests made of one bug: noticed it, passed, or never reached it.
- `Run` (`run`): the outcomes of all bugs.

Start at `run.mutate`. Only the command line and the reports import this room.
"""

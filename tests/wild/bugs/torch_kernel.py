"""Bugs of a backward pass that is written by hand."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("torch_kernel", "train-gqa", "gradients", in_output=False)

SUMS = ("dk = dk.unflatten(1, (-1, group)).sum(2)\n"
        "        dv = dv.unflatten(1, (-1, group)).sum(2)")
MASK = 'scores = scores.masked_fill(hidden[..., now], float("-inf"))'
WEIGHTS = "weights = (scores - lse).exp()\n            dv[:"
DROPOUT = "DROPOUT, DRAWS_AGAIN, SCALES_WEIGHTS, SCALES_GRADIENTS = 0.0, False, True, True"
DELTA = "d_scores = weights * (d_weights - delta)"
DQ = "dq += d_scores @ k_block * scale"
DK = "dk[:, :, now] += d_scores.mT @ queries * scale"


def dropout(settings):
    return DROPOUT, DROPOUT.split(" = ")[0] + f" = {settings}"


m("group-not-summed", "gradient", (SUMS, "dk, dv = dk[:, ::group], dv[:, ::group]"),
  "The gradients of shared heads are those of the first query head.", "grad.v")
m("group-averaged", "gradient", (SUMS, SUMS.replace(".sum(2)", ".mean(2)")), "Those of a group are averaged.", "grad.v")
m("group-tiled", "gradient", (SUMS, SUMS.replace("(-1, group)", "(group, -1)").replace(".sum(2)", ".sum(1)")),
  "They are summed over the wrong axis.", "grad.v")
m("group-in-bf16", "precision", (SUMS, SUMS.replace("dk.unf", "dk.bfloat16().unf").replace("dv.unf", "dv.bfloat16().unf")),
  "They are kept in bfloat16 until they are summed.", "grad.v")
m("scores-in-fp16", "precision", (DELTA, f"{DELTA}\n            d_scores = d_scores.half().float()"),
  "The gradients of the scores are rounded to float16.", "grad.q")
m("padding-visible", "gradient", (MASK,
    'scores = scores.masked_fill((torch.arange(k.shape[2]) > torch.arange(k.shape[2])[:, None])[:, now], float("-inf"))'),
  "The mask of the backward pass lacks padding.", "grad.v", limited={"B": (1,)})
m("mask-lost", "gradient", (MASK, "pass"), "The backward pass has no mask.", "grad.v")
m("lse-of-block", "gradient",
  (WEIGHTS, WEIGHTS.replace("(scores - lse).exp()", "scores.softmax(-1).nan_to_num()")),
  "Each block has its own log-sum-exp.", "grad.v", case="train-full")
m("scale-lost", "gradient", (DQ, DQ.replace(" * scale", "")), "dq is not scaled.", "grad.q")
m("delta-lost", "gradient", (DELTA, "d_scores = weights * d_weights"), "The mean of a row is not subtracted.", "grad.q")
m("dropout-again", "gradient", dropout("0.25, True, True, True"), "Dropout is drawn again in the backward pass.",
  "attn_weights", case="train-full", in_output=True)
m("dropout-unscaled", "gradient", dropout("0.25, False, False, False"),
  "The backward pass does not divide by 1 - p.", "attn_weights", case="train-full", in_output=True)
m("dropout-gradients-unscaled", "gradient", dropout("0.25, False, True, False"),
  "The gradients of the weights are not divided by 1 - p.", "attn_weights", case="train-full", in_output=True)

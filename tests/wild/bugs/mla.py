"""Bugs injected into the port modeled on DeepSeek V3."""

from wild.bugs.writer import Writer

# A table with one record per bug: the edit next to its description.
# fmt: off
m = Writer("mla", "mla")

SCALE = "softmax_scale = spec.head_dim**-0.5 * mscale_all_dim * mscale_all_dim"
AMPLITUDE = "amplitude = mscale / mscale_all_dim"
PRODUCT = "scores = torch.matmul(query.to(work), key.to(work).transpose(2, 3)) * softmax_scale"
LATER = (1, 2, 3, 4, 5, 6, 7, 8)

m("mscale-lost", "scale", (SCALE, "softmax_scale = spec.head_dim**-0.5"), "The scale has no mscale.", "scores",
  pattern="1 / mscale squared")
m("mscale-once", "scale", (SCALE, SCALE.removesuffix(" * mscale_all_dim")), "The scale has mscale once.", "scores",
  pattern="1 / mscale")
m("mscale-fourth", "scale", (PRODUCT, PRODUCT + " * mscale_all_dim**2"), "The scale has mscale four times.", "scores",
  pattern="mscale squared")
m("scaled-twice", "scale", (PRODUCT, PRODUCT + " * softmax_scale"), "The kernel scales what is scaled.", "scores",
  pattern="the scale")
m("amplitude-whole", "rope", (AMPLITUDE, "amplitude = yarn_get_mscale(scaling.factor, 1.0)"),
  "Tables have the usual amplitude of YaRN, which the equal mscales cancel.", "q",
  limited={"H": (8, 9, 10, 11, 12, 13, 14, 15)}, pattern="rotated features times 1.3689")
m("amplitude-numerator", "rope", (AMPLITUDE, "amplitude = mscale"),
  "The amplitude is not divided by that of all dimensions.", "q", case="mla-other",
  limited={"H": (8, 9, 10, 11, 12, 13, 14, 15)}, pattern="rotated features times 1.3689")
m("scale-of-values", "scale", (SCALE, SCALE.replace("spec.head_dim", "spec.value_head_dim")),
  "The scale is that of the width of values.", "scores", pattern="root of 16 / 12")

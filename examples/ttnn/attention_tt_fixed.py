"""The correct layer: the kernel rotates neighbors, but Hugging Face weights are in halves."""

import attention_tt


class Attention(attention_tt.Attention):
    """The draft with its bug fixed."""

    def rows(self, weight):
        """Return the rows of a projection in the order of the RoPE kernel: (i, i + H/2) side by
        side.
        """
        halves = weight.reshape(-1, 2, self.head_dim // 2, weight.shape[1])
        return halves.swapaxes(1, 2).reshape(weight.shape)

"""The core of chunked losses: logits of some tokens at a time, their statistics, and gradients.

Read in this order; each file uses only those above it (of two in a line, either), ``liger_losses.kernels`` and torch.

- ``options``: what users may set
- ``quantizers``, ``agreement``, ``ranks``, ``buffers``, ``weights``, ``head``: what logits are made of,
  who has which columns, and where gradients add up
- ``statistics``: what is asked of the softmax of a token, and what users get
- ``target``: tokens, their head, and what belongs to each: labels, temperatures, columns, a teacher
- ``plan``: how many tokens at a time, when gradients are computed, and which block holds them
- ``rows``, ``block``: the logits of some tokens: statistics, then gradients
- ``saved``, ``checks``, ``stream``: the two ways in, :func:`statistics` and :func:`loss_sum`, and the only two autograd
  functions
- ``compiled``: the same as operators of torch.compile

What users call makes targets of their arguments, and none of the files above knows it:

- ``distilled``: teachers
- ``inputs``, ``entry``, ``ops``: from arguments to targets; the operations
"""

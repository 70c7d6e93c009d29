"""Tensors of every kind that a digest may be asked for, and a check of the kernel for cards without one.

    TRITON_INTERPRET=1 python -m tests.trainer_core.weights.digest_cases

runs the kernel in Triton's interpreter and exits with 0 if it finds what the processor finds.
"""

import sys

import torch


def values(count, dtype=torch.bfloat16):
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).mul(50).to(dtype)


def cases():
    types = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
    flat = [values(count, dtype) for dtype in types for count in (0, 1, 3, 4, 7, 8, 9, 1000, 5000, 10001)]
    matrix = values(6400).view(80, 80)
    cube = matrix.view(8, 10, 80)
    views = [
        *(matrix[3:], matrix[:0], matrix[5:6, 3:9], matrix.t(), matrix[::2]),
        *(matrix[:, 8:24], matrix[:, 6:26], matrix[:, :3], matrix[:, :1]),  # columns: whole words, and not
        *(cube[:, :, 16:32], cube[:, 2:5], cube[:, 2:5, 4:8], matrix.view(80, 20, 4)[:, 3]),
        *(matrix.view(-1)[first:1003] for first in (1, 2, 4)),  # begins within a word
        *(matrix.view(-1).view(torch.uint8)[3:900], torch.tensor(3.5), torch.zeros(2, 3, 0)),
    ]
    return [*flat, *views]


def buffer():
    return values(20_000).view(torch.uint8)


def in_buffer(octets):
    """Tensors in a buffer that a card's kernel reads in place."""
    numbers = octets.view(torch.bfloat16)
    matrix = numbers[128:6528].view(80, 80)
    return [
        *(numbers[4:1003], numbers[5:1003], octets[3:900], octets[:0], octets.view(torch.float32)[64:9000]),
        *(matrix, matrix[3:], matrix[5:6], matrix[:, 8:24], matrix[::2], matrix.view(8, 10, 80)[:, 2:5]),
    ]


def differing(tensors, sums):
    from trainer_core.weights import digest

    return [
        (tensor.dtype, tensor.shape, tensor.stride())
        for tensor, total in zip(tensors, sums.tolist(), strict=True)
        if (total - digest._sum_on_cpu(tensor)) % 2**64
    ]


def main():
    from trainer_core.weights import digest_kernel

    digest_kernel._SPAN = 2 * digest_kernel._BLOCK  # several programs for one tensor
    tensors = cases()
    work = digest_kernel.Work(tensors)
    for tensor in tensors:  # a prepared digest is computed of the content at its launch
        tensor.copy_(tensor * 3)
    wrong = differing(tensors, work.launch())
    thought_of = in_buffer(torch.empty_like(buffer(), device="meta"))
    rows = [digest_kernel.rows_in_buffer(one) for one in thought_of]
    table = digest_kernel.Table([rows[:4], [], rows[4:]], torch.device("cpu"))
    for octets in (buffer(), buffer().flip(0)):  # more than once, each time of another buffer
        sums = table.sums()
        for group in (2, 1, 0):
            table.add(sums, group, base=octets.data_ptr())
        wrong += differing(in_buffer(octets), sums)
    if digest_kernel.rows_in_buffer(thought_of[5][:, :3]) is not None:  # not of whole words
        wrong.append("taken for readable")
    sys.exit(f"differ: {wrong}" if wrong else 0)


if __name__ == "__main__":
    main()

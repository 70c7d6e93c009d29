"""Arenas on a card, as far as a machine without one can tell: CUDA's library is a few lines here."""

from types import SimpleNamespace

import pytest
import torch

from storage.errors import StorageUnavailable
from trainer_core.weights.transports import card

SUCCESS, NO_MEMORY, NO_LINK = (SimpleNamespace(name=name) for name in ("success", "no memory", "no link"))


class Library:
    """A card with room for some arenas, whose memory no other card reads."""

    cudaError_t = SimpleNamespace(cudaSuccess=SUCCESS)  # noqa: N815

    def __init__(self, room):
        self.room, self.taken = room, []

    def cudaMalloc(self, size):  # noqa: N802
        if len(self.taken) == self.room:
            return NO_MEMORY, 0
        self.taken.append(1000 + len(self.taken))
        return SUCCESS, self.taken[-1]

    def cudaFree(self, address):  # noqa: N802
        self.taken.remove(address)
        return (SUCCESS,)


@pytest.fixture
def library(monkeypatch):
    def made(room):
        found = Library(room)
        monkeypatch.setattr(card, "runtime", found)
        return found

    return made


def test_memory_is_a_tensor_of_the_device_that_is_named():
    memory = torch.arange(16, dtype=torch.uint8)
    found = card.tensor_at(memory.data_ptr(), 16, torch.device("cpu"))
    memory[3] = 99
    assert found.data_ptr() == memory.data_ptr()
    assert torch.equal(found, memory)


def test_arenas_that_do_not_all_fit_take_no_memory(library):
    found = library(room=1)
    with pytest.raises(StorageUnavailable, match=r"could not be reserved: no memory .*lower sync\.arena_mib or set"):
        card._reserved(8, 2)
    assert found.taken == []


def test_as_many_arenas_are_reserved_as_were_asked_for(library):
    found = library(room=3)
    assert card._reserved(8, 2) == found.taken == [1000, 1001]


def test_arenas_of_another_size_are_given_back_one_update_later(library, monkeypatch):
    """An engine may have them open until then."""
    for name, empty in (("_exported", {}), ("_replaced", [])):
        monkeypatch.setattr(card, name, empty)
    found, seen = library(room=4), []
    for size in (8, 8, 16, 16):
        card._keep((0, size, 2))
        seen.append(list(found.taken))
    assert seen == [[1000, 1001], [1000, 1001], [1000, 1001, 1002, 1003], [1002, 1003]]


@pytest.mark.parametrize(
    ("own", "said"), [("B", "could not be opened on card B: no link"), ("A", "on card B from card A: no link")]
)
def test_what_cannot_be_opened_is_told_with_both_cards_and_the_repair(own, said):
    with pytest.raises(StorageUnavailable, match=f'{said} .*set sync.transport to "memory"'):
        card._done((NO_LINK,), card._opening("B", own))

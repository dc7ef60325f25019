"""Faults of publishing, merging, waiting and receive storage."""

from __future__ import annotations

from .fault import EXCHANGE_TESTS, MERGE_TESTS, Mutant

PUBLISH = "torch_backend/topk_select_publish.py"
MERGE = "torch_backend/merge_candidates.py"
WAITING = "torch_backend/waiting.py"
MODEL_TESTS = ("test_exchange_model.py", "-k", "backends_take or hands_out")
SYMMETRIC_TESTS = ("test_symmetric_memory.py", "-k", "not both_forms and not takes_the_place")

MUTANTS = (
    Mutant(
        "a duplicate id keeps its smaller score",
        ((MERGE, "keys.sort(-1, descending=True)", "keys.sort(-1, descending=False)"),),
        MERGE_TESTS,
    ),
    Mutant(
        "one word's tag speaks for its row",
        ((MERGE, "lambda: absent().any(-1).any(0)", "lambda: absent()[..., -1].any(0)"),),
        MERGE_TESTS,
    ),
    Mutant(
        "the ready word is not cleared",
        ((MERGE, "ready.masked_fill_(there, 0)", "ready.masked_fill_(there, 1)"),),
        MERGE_TESTS,
    ),
    Mutant(
        "a late merge clears ready words",
        ((MERGE, "ready.masked_fill_(there, 0)", "ready.zero_()"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a late merge does not advance the generation",
        ((MERGE, "expected.copy_(wanted)", "expected.copy_(torch.where(late, expected, wanted))"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a late merge returns what is there",
        ((MERGE, "merged.masked_fill_(late.T[:, :, None], rows.PAD_ID)", "pass"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a late publish stores",
        (
            (
                PUBLISH,
                "    record_failures(errors, late, slot",
                "    _store(words, targets, late)\n    record_failures(errors, late, slot",
            ),
        ),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a publish does not wait",
        ((PUBLISH, "dim=1) != 0", "dim=1) < 0"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "every wait takes its whole limit",
        ((WAITING, "1 if int(errors[0]) != 0 else spin_limit", "spin_limit"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a wait polls four times as often as its limit says",
        ((WAITING, "!= 0 else spin_limit", "!= 0 else 4 * spin_limit"),),
        ("test_polls.py", "-k", "torch-cpu"),
    ),
    Mutant(
        "a failure is counted once a call",
        ((WAITING, "errors[0] += count", "errors[0] += 1"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "the last failure is recorded, not the first",
        ((WAITING, "if int(errors[0]) == 0 and errors.shape[0] >= 4:", "if errors.shape[0] >= 4:"),),
        EXCHANGE_TESTS,
    ),
    Mutant(
        "a counter advances for the whole batch that was",
        (
            (
                PUBLISH,
                "generations[slot, :, :tokens]\n        counters += 1",
                "generations[slot, :, :tokens]\n        generations[slot] += 1",
            ),
        ),
        MODEL_TESTS,
    ),
    Mutant(
        "the rotation of the slot sets stands still",
        (("storage.py", "self._next_slot = (chosen + 1) % geometry.SLOT_SETS", "self._next_slot = chosen"),),
        MODEL_TESTS,
    ),
    Mutant(
        "a slot set in flight is handed out",
        (("storage.py", "if chosen in self._in_flight and not idle:", "if False:"),),
        ("test_storage.py",),
    ),
    Mutant(
        "rank 0 keeps to itself who is gone",
        (
            (
                "agreement.py",
                "attempt(rank, self._send, mask, timeout)",
                "attempt(rank, self._send, 0, timeout)",
            ),
        ),
        ("test_storage_processes.py", "-k", "names_it and 2"),
    ),
    Mutant(
        "a signal waits until the group has met",
        (
            (
                "agreement.py",
                "wait_for(lambda: self._ask_all(timeout) if self.rank == 0 else self._ask_first(timeout))",
                "self._ask_all(timeout) if self.rank == 0 else self._ask_first(timeout)",
            ),
        ),
        ("test_storage_processes.py", "-k", "interrupt and limit"),
    ),
    Mutant(
        "a rank that has given up is answered",
        (("agreement.py", "    except NoAgreementError:\n        raise\n", ""),),
        ("test_symmetric_memory.py", "-k", "not_answered"),
    ),
    Mutant(
        "a reset does not wait for the device before it clears",
        (
            (
                "storage.py",
                "            _finish(self.device)\n        except Exception as error:\n",
                "            pass\n        except Exception as error:\n",
            ),
        ),
        ("test_symmetric_memory.py", "-k", "reset_clears"),
    ),
    Mutant(
        "a reset with a broken device tells nobody",
        (("storage.py", "                raise failure\n", "                pass\n"),),
        ("test_symmetric_memory.py", "-k", "broken_device"),
    ),
    Mutant(
        "a wait that is interrupted leaves no word",
        (
            (
                WAITING,
                "    finally:\n        ended(late)",
                "    except ZeroDivisionError:\n        ended(late)",
            ),
        ),
        ("test_exchange.py", "-k", "ctrl_c"),
    ),
    Mutant(
        "a closed storage keeps its group",
        (("storage.py", "            self._exchange = None", "            pass"),),
        ("test_symmetric_memory.py", "-k", "close"),
    ),
    Mutant(
        "one rank's leave to share a card is enough",
        (("symmetric_memory.py", "or all(card.one_card", "or any(card.one_card"),),
        SYMMETRIC_TESTS,
    ),
    Mutant(
        "marks are not looked at",
        (("symmetric_memory.py", "            _check_marks(words)\n", ""),),
        SYMMETRIC_TESTS,
    ),
    Mutant(
        "a mark stays in the storage",
        (("symmetric_memory.py", "        mine[0] = 0\n", ""),),
        ("test_symmetric_memory.py", "-k", "both_forms and 2"),
    ),
    Mutant(
        "a mark is cleared some time after the storage is there",
        (
            (
                "symmetric_memory.py",
                "        mine[0] = 0\n        torch.cuda.synchronize(device)\n",
                "        mine[0] = 0\n",
            ),
        ),
        ("test_symmetric_memory.py", "-k", "both_forms and 2"),
    ),
    Mutant(
        "PyTorch may set up multicast",
        (("symmetric_memory.py", 'os.environ[NO_MULTICAST] = "1"', 'os.environ[NO_MULTICAST] = "0"'),),
        ("test_symmetric_memory.py", "-k", "both_forms and 2"),
    ),
    Mutant(
        "a rank that finds another dead leaves the living without its rows",
        (("prefill_exchange.py", "failure = failure or error", "raise error"),),
        ("test_exchange_prefill.py", "-k", "killed_rank"),
    ),
)

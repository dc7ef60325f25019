"""Faults of the facade: its checks, prepared steps and layer graphs."""

from __future__ import annotations

from .fault import Mutant

CHAINS = "indexer/chains.py"
STEPS = "indexer/steps.py"
GRAPHS = "indexer/graphs.py"
QUERY = "indexer/graph_query.py"
FACADE_TESTS = ("test_indexer.py",)
STEP_TESTS = ("test_indexer_steps.py",)
QUERY_TESTS = ("test_graph_query.py",)
LAUNCHER = "cuda_backend/launcher.py"
LAUNCHER_TESTS = ("test_launcher.py",)
MADE_TESTS = ("test_indexer_allocations.py",)
GRAPH_TESTS = ("test_indexer_graphs.py", "-k", "not disagree")

MUTANTS = (
    Mutant(
        "the facade fills its score rows before it scores a window",
        (("indexer/chains.py", "max_score=scores, initialize=False", "max_score=scores, initialize=True"),),
        ("test_indexer.py", "-k", "causal_prefixes"),
    ),
    Mutant(
        "a publish does not look at the output of its merge",
        (("indexer/chains.py", "    if without_merge:  # which", "    if False:  # which"),),
        ("test_indexer.py", "-k", "cannot_be_merged"),
    ),
    Mutant(
        "a layer graph lets itself be traced",
        (("indexer/graphs.py", '        refuse_tracing("layer graph")\n', ""),),
        ("test_indexer_compiled.py", "-k", "layer_graphs_are_not_traced"),
    ),
    Mutant(
        "windows planned in one place are taken",
        ((STEPS, "if plans[first] is not plan:", "if False:"),),
        ("test_indexer_steps.py", "-k", "planned_in_one_place"),
    ),
    Mutant(
        "the plan's spin limit does not reach the merge",
        (
            (
                CHAINS,
                "spin_limit=plan.spin_limit,\n            enable_pdl",
                "spin_limit=1 << 18,\n            enable_pdl",
            ),
        ),
        (*FACADE_TESTS, "-k", "missing_peer"),
    ),
    Mutant(
        "dependent launch is no part of a launch's key",
        (("cuda_backend/launcher.py", "return self._dependent, *super().key()", "return super().key()"),),
        ("test_indexer_graphs.py", "-k", "start_early"),
        emulated=True,
    ),
    Mutant(
        "a traced call takes any comm",
        (("indexer/plan.py", 'comm_fields(arguments["comm"], self.limits, self.device)', "pass"),),
        ("test_indexer_compiled.py", "-k", "not_the_plans"),
    ),
    Mutant(
        "every window is planned into the same words",
        (("indexer/plan.py", "self.work_info[place]", "self.work_info[0]"),),
        (*FACADE_TESTS, "-k", "plan_of_its_own"),
    ),
    Mutant(
        "a comm that moved is not checked again",
        (("indexer/comm.py", " or found.data_ptr() != address", ""),),
        (*FACADE_TESTS, "-k", "checked_again"),
    ),
    Mutant(
        "a publish is launched before the merge is checked",
        (("launches.py", "            if recorder.launches is None:", "            if True:"),),
        (*FACADE_TESTS, "-k", "nothing_is_launched"),
    ),
    Mutant(
        "an output of inference mode is found out when the rows are published",
        (("launches.py", "        op = torch.inference_mode()(op)\n", ""),),
        (*FACADE_TESTS, "-k", "inference_mode_are_written"),
    ),
    Mutant(
        "the fused form's rule is off by one",
        ((CHAINS, "requests >= plan.fused", "requests > plan.fused"),),
        (*FACADE_TESTS, "-k", "number_of_requests"),
    ),
    Mutant(
        "a layer is launched with the first one's keys",
        (("launches.py", "            arguments[1] = keys\n", ""),),
        (*STEP_TESTS, "-k", "those_of_the_call or prefill_layers"),
    ),
    Mutant(
        "a kept launch has the K shard of the layer before",
        ((LAUNCHER, "words[0], words[1] = arguments[0], arguments[1]", "words[0] = arguments[0]"),),
        LAUNCHER_TESTS,
    ),
    Mutant(
        "a kept launch without a query is bound to the one of a layer",
        ((LAUNCHER, "        self.takes_query = kernel.takes_query", "        self.takes_query = True"),),
        LAUNCHER_TESTS,
    ),
    Mutant(
        "a kept launch stays on its first stream",
        (
            (
                LAUNCHER,
                "            own.set_stream(stream)",
                "            own.stream or own.set_stream(stream)",
            ),
        ),
        LAUNCHER_TESTS,
    ),
    Mutant(
        "a kept launch goes to the current device",
        ((LAUNCHER, " or _C._cuda_getDevice() != own.device", ""),),
        LAUNCHER_TESTS,
    ),
    Mutant(
        "a kept launch finds a thread without a context",
        ((LAUNCHER, " or not _thread.has_context", ""),),
        LAUNCHER_TESTS,
    ),
    Mutant(
        "what the driver answers a kept launch is not looked at",
        ((LAUNCHER, "        if answer[0] is not own.success:", "        if False:"),),
        LAUNCHER_TESTS,
    ),
    Mutant(
        "recorded launches share their words",
        (
            (
                LAUNCHER,
                "        self.function = kernel.load(device)",
                "        self.words, self.address = kernel._launcher(dependent).words, "
                "kernel._launcher(dependent).address\n        self.function = kernel.load(device)",
            ),
        ),
        LAUNCHER_TESTS,
    ),
    Mutant(
        "one slot set's launches serve all",
        (
            (
                STEPS,
                'self._by_slot.get(checks.integer("slot", slot, 0, SLOT_SETS - 1))',
                "next(iter(self._by_slot.values()), None)",
            ),
        ),
        STEP_TESTS,
    ),
    Mutant(
        "a window takes the first rows of the query",
        ((STEPS, "one.window = (start, end)", "one.window = (0, end - start)"),),
        (*STEP_TESTS, "-k", "windows_take"),
    ),
    Mutant(
        "a layer's alignment is not looked at",
        ((STEPS, ", tensor.data_ptr() % ALIGNED\n", ", 0\n"),),
        (*STEP_TESTS, "-k", "unlike"),
    ),
    Mutant(
        "a first layer that was refused counts",
        ((STEPS, "                if not self._by_slot:\n                    self._layers.forget()\n", ""),),
        (*STEP_TESTS, "-k", "refused"),
    ),
    Mutant(
        "a closed storage is not noticed",
        ((STEPS, "if self._storage is not None and not", "if False and not"),),
        (*STEP_TESTS, "-k", "closed_storage"),
    ),
    Mutant(
        "what was recorded is the step's own list",
        ((STEPS, "list(self._bound(index_q, index_k, slot))", "self._bound(index_q, index_k, slot)"),),
        (*STEP_TESTS, "-k", "recorded_list"),
    ),
    Mutant(
        "a prefill layer is launched before its merge is checked",
        ((STEPS, "                self._bound_merge()  # what", "                # what"),),
        (*STEP_TESTS, "-k", "both_halves"),
    ),
    Mutant(
        "a shard of pages of another size is scored",
        ((CHAINS, '    checks.tensor("index_k", index_k, checks.FP8, shape, device=plan.device)\n', ""),),
        (*FACADE_TESTS, "-k", "prefill_local_is_named"),
    ),
    Mutant(
        "an error names the argument of the function below",
        ((CHAINS, "if name is not None and name[0] in names:", "if False:"),),
        (*FACADE_TESTS, "-k", "named"),
    ),
    Mutant(
        "slot sets share a graph",
        ((GRAPHS, "0 if self._decode is None else slot", "0"),),
        GRAPH_TESTS,
    ),
    Mutant(
        "K shards share a graph",
        ((GRAPHS, " or state.keys != keys", ""),),
        GRAPH_TESTS,
    ),
    Mutant(
        "prefill is in no key",
        ((GRAPHS, "for part in parts)", "for part in parts[:1])"),),
        (*GRAPH_TESTS[:2], "key_of_prefill"),
    ),
    Mutant(
        "the exchange is in no key",
        ((GRAPHS, "return self._exchange_key, launches", "return launches"),),
        (*GRAPH_TESTS[:2], "key_of_prefill"),
    ),
    Mutant(
        "a replay has the query of the capture",
        ((GRAPHS, "        else:\n            self._words.read_from(index_q)\n", ""),),
        (*GRAPH_TESTS[:2], "stay_right and read"),
    ),
    Mutant(
        "a replay has the query of the one before",
        (
            (
                GRAPHS,
                "        if self._words is None:\n            self._staged.copy_(index_q)\n",
                "        if self._words is None:\n            pass\n",
            ),
        ),
        (*GRAPH_TESTS[:2], "stay_right and copied"),
    ),
    Mutant(
        "a replay takes a query that an eager layer refuses",
        ((GRAPHS, "over = index_q.data_ptr() % ALIGNED", "over = 0"),),
        (*GRAPH_TESTS[:2], "off_the_alignment"),
    ),
    Mutant(
        "a replay with debug compares nothing",
        ((GRAPHS, "            if self._debug:", "            if False:"),),
        (*GRAPH_TESTS[:2], "replay_with_debug"),
    ),
    Mutant(
        "a reader that a graph hides keeps the query of the capture",
        ((GRAPHS, "return words if words.count == readers else None", "return words"),),
        QUERY_TESTS,
    ),
    Mutant(
        "a strided query is read as a dense one",
        ((GRAPHS, "index_q.stride() != staged.stride() or", ""),),
        QUERY_TESTS,
    ),
    Mutant(
        "an address that the driver refused counts as set",
        ((QUERY, "        self._address = None  # neither", "        self._address = address  # neither"),),
        QUERY_TESTS,
    ),
    Mutant(
        "a window's rows are read from the begin of the query",
        ((QUERY, "word.value = address + offset", "word.value = address"),),
        QUERY_TESTS,
    ),
    Mutant(
        "what lies behind the staging buffer is the query, too",
        ((QUERY, "if begin <= word.value < end", "if begin <= word.value <= end"),),
        QUERY_TESTS,
    ),
    Mutant(
        "the key used last goes",
        ((GRAPHS, "min(captured, key", "max(captured, key"),),
        (*GRAPH_TESTS[:2], "least_recently"),
    ),
    Mutant(
        "batches that come once push out one that stays",
        (
            (
                GRAPHS,
                "captured = [other for other in self._keys.values() if other.staging is not None]",
                "captured = list(self._keys.values())",
            ),
        ),
        (*GRAPH_TESTS[:2], "come_once"),
    ),
    Mutant(
        "a query on another device is copied into the graph",
        ((GRAPHS, "index_q.dtype, index_q.device", "index_q.dtype"),),
        (*GRAPH_TESTS[:2], "replay_refuses"),
    ),
    Mutant(
        "a window is planned with a look at its lengths",
        (
            (
                "indexer/plan.py",
                '        checks.integer("total_q", total_q, 1, self.limits.window_tokens)',
                '        checks.integer("max_query_len", max_query_len, int(lens.max()))\n'
                '        checks.integer("total_q", total_q, 1, self.limits.window_tokens)',
            ),
        ),
        (*MADE_TESTS, "-k", "prefill"),
    ),
    Mutant(
        "the merge of prefill has a copy of what was received",
        (
            (
                CHAINS,
                "        received,\n        num_valid_pages",
                "        received.clone(),\n        num_valid_pages",
            ),
        ),
        (*MADE_TESTS, "-k", "prefill"),
    ),
    Mutant(
        "a replay makes a copy of its query",
        ((GRAPHS, "self._words.read_from(index_q)", "self._words.read_from(index_q.clone())"),),
        (*MADE_TESTS, "-k", "replay"),
    ),
    Mutant(
        "publish and the scorer are always launched as dependent",
        (
            (
                CHAINS,
                '        "enable_pdl": enable_pdl,\n        "backend": plan.backend,\n    }',
                '        "enable_pdl": True,\n        "backend": plan.backend,\n    }',
            ),
            (
                CHAINS,
                "        enable_pdl=enable_pdl,\n        backend=plan.backend,\n        **shard",
                "        enable_pdl=True,\n        backend=plan.backend,\n        **shard",
            ),
        ),
        (*FACADE_TESTS, "-k", "dependent_launch"),
    ),
    Mutant(
        "the merge is never launched as dependent",
        (
            (
                CHAINS,
                "            spin_limit=plan.spin_limit,\n            enable_pdl=enable_pdl,",
                "            spin_limit=plan.spin_limit,\n            enable_pdl=False,",
            ),
        ),
        (*FACADE_TESTS, "-k", "dependent_launch"),
    ),
    Mutant(
        "the staging buffer can be written in inference mode alone",
        (
            (
                GRAPHS,
                "    @torch.inference_mode(False)  # an inference tensor",
                "    # an inference tensor",
            ),
        ),
        (*GRAPH_TESTS[:2], "captured_in_inference_mode"),
    ),
    Mutant(
        "a key that is pushed out keeps its graphs and its staging buffer",
        ((GRAPHS, "        entry.layers.clear()\n        entry.staging = None\n", ""),),
        (*GRAPH_TESTS[:2], "pushed_out"),
    ),
    Mutant(
        "debug does not look at the query and the K shard",
        (
            (
                STEPS,
                "if (ours.key(), ours.bound()) != (theirs.key(), theirs.bound()):",
                "if ours.key() != theirs.key():",
            ),
        ),
        (*STEP_TESTS, "-k", "debug_finds"),
    ),
)

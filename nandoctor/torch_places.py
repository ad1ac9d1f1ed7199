"""The private places of torch that nandoctor uses, what for, and why nothing public serves."""

# Place -> what it is used for. The comments say why nothing public does the same.
NEEDED: dict[str, str] = {
    # Which forward a checkpoint computes again: nothing else tells it from that of the next step.
    "torch._C._current_graph_task_id": "telling what a backward pass computes again",
    "torch._C._InferenceMode": "copying weights before each update",
    # One call for a few tensors of many shapes, for which `torch.cat` would need a view of each.
    "torch._utils._flatten_dense_tensors": "reading the gradients of small models",
    # TorchDispatchMode sees ops below autocast and after composites have been taken apart; TorchFunctionMode misses
    # what C++ calls itself. A dispatch key above both sees each op once, as the user called it.
    "torch._C._parse_dispatch_key": "watching operations",
    "torch._C._dispatch_keyset_full_after": "watching operations",
    "torch._C._IncludeDispatchKeyGuard": "watching operations",
    "torch._C._ExcludeDispatchKeyGuard": "watching operations, and emulating CUDA's autocast",
    "torch._C.DispatchKeySet": "watching operations, and emulating CUDA's autocast",
    # Operators that take functions (flex_attention, cond) look for a kernel of the key in Python, and have no fallback.
    "torch._ops._compute_keyset": "watching operations inside flex_attention and torch.cond",
    # `Library` is public, its end is not: without it the kernels stay registered until the garbage collector comes by.
    "torch.library.Library._destroy": "taking kernels back out of torch",
    "torch.library.Library.fallback": "watching operations",
    # A kernel that takes the place of another cannot call that by any public way.
    "torch._ops.OpOverload.redispatch": "watching operations, and keeping non-finite operands of convolutions",
    "torch._ops.OpOverload.decompose": "emulating CUDA's autocast for ops that hold several products",
    # Which argument is which: the public `torch.library.infer_schema` is for new ops only.
    "torch.ops.aten.add.Tensor._schema": "reading the arguments of operations",
    # What the CPU's own autocast casts has to be known to be switched off; torch publishes no list.
    "torch._C._dispatch_get_registrations_for_dispatch_key": "emulating CUDA's autocast",
    "torch._C.DispatchKey.AutocastCPU": "emulating CUDA's autocast",
    "torch._C.DispatchKey.AutocastCUDA": "emulating CUDA's autocast",
    # TorchScript's own autocast pass has another list. `torch.jit` has no switch for it.
    "torch._C._jit_set_autocast_mode": "emulating CUDA's autocast under TorchScript",
    # An autocast region for "cuda" warns and stays off for good without a GPU, and no mode or hook sees it.
    "torch.amp.autocast_mode.autocast.__init__": "autocast regions written for CUDA",
    "torch.amp.autocast_mode.autocast.__enter__": "autocast regions written for CUDA",
    "torch.amp.autocast_mode.autocast.__exit__": "autocast regions written for CUDA",
    "torch.amp.autocast_mode._cast": "custom_fwd(cast_inputs=...) written for CUDA",
    "torch.utils._device.DeviceContext.__init__": '`with torch.device("cuda")` in a model',
    # The tensors that `torch.vmap` hands to a model raise when they are read; `torch.func` has no way to look inside.
    "torch._C._functorch.is_functorch_wrapped_tensor": "models that use torch.func",
    "torch._C._functorch.get_unwrapped": "models that use torch.func",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "recording steps that are compiled",
    "torch._C._are_functorch_transforms_active": "models that use torch.func",
    "torch._C._DisableFuncTorch": "models that use torch.func",
    # Tensor.backward and torch.autograd.backward are functions of torch, which a function mode is suspended in.
    "torch.autograd.graph._engine_run_backward": "widening what a Function's own backward computes in half precision",
    # `torch._C.DisableTorchFunctionSubclass`, the documented half, leaves function modes such as DeviceContext on.
    "torch._C.DisableTorchFunctionSubclass": "keeping the state of models with tensors of a subclass",
    "torch._C.DisableTorchFunction": "reading tensors while a function mode is active",
    # `torch.load` looks up an archive's members by rules of its own, and so might read others than were checked.
    "torch._utils._rebuild_tensor_v2": "reading dumps from the bytes that were checked",
    "torch._utils._rebuild_tensor_v3": "reading dumps from the bytes that were checked",
    "torch._utils._rebuild_qtensor": "reading dumps from the bytes that were checked",
    # `torch.set_printoptions` has no counterpart that reads.
    "torch._tensor_str.PRINT_OPTS": "putting back the print options that a model's code has changed",
    # `TorchFunctionMode`, its public sister, misses the tensors that initialisers make from within C++.
    "torch.utils._python_dispatch.TorchDispatchMode": "bounding the memory that a model takes to build",
    # Python counts its own references alone.
    "torch._C._storage_Use_Count": "building models without filling them",
    "torch.UntypedStorage._cdata": "building models without filling them",
    # The one sign that a tensor was written to in place.
    "torch.Tensor._version": "noticing in-place writes",
    # A loop over `copy_` launches a kernel for each of a model's buffers, in every training step.
    "torch._foreach_copy_": "keeping the buffers of a model in training",
    # `tensor._base is not None` is as private.
    "torch.Tensor._is_view": "emulating autocast's cache of cast weights",
    # nn.Parameter, made in a forward, calls it: torch has no hook for a tensor that changes its class.
    "torch.Tensor._make_subclass": "watching layers that are built in a forward",
    # `coalesce().values()` adds up duplicates, and so shows other numbers than the tensor holds.
    "torch.Tensor._values": "reading sparse tensors",
    # `optree` would be one more dependency, and does not know the containers that transformers registers here.
    "torch.utils._pytree.tree_map": "walking nested containers",
    "torch.utils._pytree.tree_leaves": "walking nested containers",
    # The public classes are its leaves: a norm of somebody's own derives from this.
    "torch.nn.modules.batchnorm._NormBase": "telling which buffers a norm only writes",
    # `compile()` on a model in place leaves its hooks inside the graph; only the call itself is outside.
    "torch.nn.Module._compiled_call_impl": "recording models that were compiled in place",
    # Modules override it, also where `load_state_dict` itself is torch's.
    "torch.nn.Module._load_from_state_dict": "loading weights into models of very many modules",
    "torch.autograd.function.BackwardCFunction": "telling custom autograd functions from torch's own",
    # The line that TorchScript runs is in no Python frame; an exception alone would show it.
    "torch._C._profiler.gather_traceback": "telling the lines of TorchScript",
    "torch._C._profiler.symbolize_tracebacks": "telling the lines of TorchScript",
    "torch.utils.checkpoint.CheckpointFunction.apply": "watching the gradients of checkpointed blocks",
    # Read in the forward, used by the backward: the one thing both have in common.
    "torch.utils.checkpoint._get_autocast_kwargs": "recomputing checkpointed blocks under emulated autocast",
}

# What is patched, by nandoctor.process_wide

AUTOCAST_INIT = "torch.amp.autocast_mode.autocast.__init__"
AUTOCAST_ENTER = "torch.amp.autocast_mode.autocast.__enter__"
AUTOCAST_EXIT = "torch.amp.autocast_mode.autocast.__exit__"
CUSTOM_FWD_CAST = "torch.amp.autocast_mode._cast"
DEVICE_CONTEXT_INIT = "torch.utils._device.DeviceContext.__init__"
HIGHER_ORDER_KEYS = "torch._ops._compute_keyset"
MAKE_SUBCLASS = "torch.Tensor._make_subclass"
CHECKPOINT_APPLY = "torch.utils.checkpoint.CheckpointFunction.apply"
CHECKPOINT_AUTOCAST = "torch.utils.checkpoint._get_autocast_kwargs"

"""The private places of torch that nandoctor uses, what for, and why no public API does the same."""

# Place -> what it is used for. The comments say why no public API does the same.
NEEDED: dict[str, str] = {
    # Nothing else distinguishes the forward that a checkpoint recomputes from the forward of the next step.
    "torch._C._current_graph_task_id": "telling what a backward pass computes again",
    "torch._C._InferenceMode": "copying weights before each update",
    # One call for tensors of many shapes; `torch.cat` would need a view of each.
    "torch._utils._flatten_dense_tensors": "reading the gradients of small models",
    # TorchDispatchMode sees ops below autocast and after composites are decomposed; TorchFunctionMode misses ops that
    # C++ calls. A dispatch key above both sees each op once, as the user called it.
    "torch._C._parse_dispatch_key": "watching operations",
    "torch._C._dispatch_keyset_full_after": "watching operations",
    "torch._C._IncludeDispatchKeyGuard": "watching operations",
    "torch._C._ExcludeDispatchKeyGuard": "watching operations, and emulating CUDA's autocast",
    "torch._C.DispatchKeySet": "watching operations, and emulating CUDA's autocast",
    # Higher-order operators (flex_attention, cond) look up a kernel for the key in Python, and have no fallback.
    "torch._ops._compute_keyset": "watching operations inside flex_attention and torch.cond",
    # A graph node does not say which op made it; only its number in the order of creation does.
    "torch._C._current_autograd_node": "finding the op whose derivative a forward computes",
    "torch.autograd._get_sequence_nr": "finding the op whose derivative a forward computes",
    # `Library` is public, its destructor is not: without it, kernels stay registered until garbage collection.
    "torch.library.Library._destroy": "taking kernels back out of torch",
    "torch.library.Library.fallback": "watching operations",
    # No public API lets a kernel call the one that it replaces.
    "torch._ops.OpOverload.redispatch": "watching operations",
    "torch._ops.OpOverload.decompose": "emulating CUDA's autocast for ops that hold several products",
    # Names the arguments; the public `torch.library.infer_schema` is for new ops only.
    "torch.ops.aten.add.Tensor._schema": "reading the arguments of operations",
    # The ops that the CPU's own autocast casts must be known to switch it off; torch publishes no list.
    "torch._C._dispatch_get_registrations_for_dispatch_key": "emulating CUDA's autocast",
    "torch._C.DispatchKey.AutocastCPU": "emulating CUDA's autocast",
    "torch._C.DispatchKey.AutocastCUDA": "emulating CUDA's autocast",
    # TorchScript's own autocast pass has different lists, and `torch.jit` has no switch for it.
    "torch._C._jit_set_autocast_mode": "emulating CUDA's autocast under TorchScript",
    # Without a GPU, an autocast region for "cuda" warns and stays disabled, and no mode or hook sees it.
    "torch.amp.autocast_mode.autocast.__init__": "autocast regions written for CUDA",
    "torch.amp.autocast_mode.autocast.__enter__": "autocast regions written for CUDA",
    "torch.amp.autocast_mode.autocast.__exit__": "autocast regions written for CUDA",
    "torch.amp.autocast_mode._cast": "custom_fwd(cast_inputs=...) written for CUDA",
    "torch.utils._device.DeviceContext.__init__": '`with torch.device("cuda")` in a model',
    # The tensors that `torch.vmap` passes to a model raise when they are read; `torch.func` cannot unwrap them.
    "torch._C._functorch.is_functorch_wrapped_tensor": "models that use torch.func",
    "torch._C._functorch.get_unwrapped": "models that use torch.func",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "recording steps that are compiled",
    "torch._C._are_functorch_transforms_active": "models that use torch.func",
    "torch._C._DisableFuncTorch": "models that use torch.func",
    # Tensor.backward and torch.autograd.backward are torch functions, and a function mode is suspended inside them.
    "torch.autograd.graph._engine_run_backward": "widening what a Function's own backward computes in half precision",
    # `torch._C.DisableTorchFunctionSubclass`, which is documented, leaves function modes such as DeviceContext on.
    "torch._C.DisableTorchFunctionSubclass": "keeping the state of models with tensors of a subclass",
    "torch._C.DisableTorchFunction": "reading tensors while a function mode is active",
    # `torch.set_printoptions` has no getter.
    "torch._tensor_str.PRINT_OPTS": "putting back the print options that a model's code has changed",
    # Python counts only its own references.
    "torch._C._storage_Use_Count": "building models without filling them",
    "torch.UntypedStorage._cdata": "building models without filling them",
    # The only sign that a tensor was written to in place.
    "torch.Tensor._version": "noticing in-place writes",
    # A loop over `copy_` launches a kernel for each of a model's buffers, in every training step.
    "torch._foreach_copy_": "keeping the buffers of a model in training",
    # `tensor._base is not None` is as private.
    "torch.Tensor._is_view": "emulating autocast's cache of cast weights",
    # nn.Parameter calls it when it is created in a forward; torch has no hook for a tensor that changes its class.
    "torch.Tensor._make_subclass": "watching layers that are built in a forward",
    # `coalesce().values()` adds up duplicates, so it does not return the numbers that the tensor stores.
    "torch.Tensor._values": "reading sparse tensors",
    # `optree` would be another dependency, and does not know the containers that transformers registers here.
    # The public classes are its subclasses; a user's own norm derives from this base.
    "torch.nn.modules.batchnorm._NormBase": "telling which buffers a norm only writes",
    # Compiling a model in place puts its hooks inside the graph; only this call is outside.
    "torch.nn.Module._compiled_call_impl": "recording models that were compiled in place",
    # Modules override it even if `load_state_dict` itself is torch's.
    "torch.nn.Module._load_from_state_dict": "using the weights of a file without copying them",
    "torch.autograd.function.BackwardCFunction": "telling custom autograd functions from torch's own",
    # The line that TorchScript runs is in no Python frame; only an exception would show it.
    "torch._C._profiler.gather_traceback": "telling the lines of TorchScript",
    "torch._C._profiler.symbolize_tracebacks": "telling the lines of TorchScript",
    "torch.utils.checkpoint.CheckpointFunction.apply": "watching the gradients of checkpointed blocks",
    # The forward calls it and the backward uses the result, the only thing that both have in common.
}

# Patched by nandoctor.process_wide

AUTOCAST_INIT = "torch.amp.autocast_mode.autocast.__init__"
AUTOCAST_ENTER = "torch.amp.autocast_mode.autocast.__enter__"
AUTOCAST_EXIT = "torch.amp.autocast_mode.autocast.__exit__"
CUSTOM_FWD_CAST = "torch.amp.autocast_mode._cast"
DEVICE_CONTEXT_INIT = "torch.utils._device.DeviceContext.__init__"
HIGHER_ORDER_KEYS = "torch._ops._compute_keyset"
MAKE_SUBCLASS = "torch.Tensor._make_subclass"
CHECKPOINT_APPLY = "torch.utils.checkpoint.CheckpointFunction.apply"

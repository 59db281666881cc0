// Gradients of operators: which calls need them, and what says no to them.
#pragma once
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>

#include <initializer_list>

#include "binding.h"

namespace megatron_ext {

template <typename Schema>
inline c10::TypedOperatorHandle<Schema> typed_op(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow((std::string("megatron_ext::") + name).c_str(), "").typed<Schema>();
}

template <typename... Tensors>
inline bool needs_gradient(const Tensors&... tensors) {
    return at::GradMode::is_enabled() && (... || tensors.requires_grad());
}

// For operators without a formula: a backward pass through them raises, instead of losing a gradient silently.
inline void refuse_gradients(torch::Library& library, std::initializer_list<const char*> names) {
    for (const char* name : names) library.impl(name, torch::autograd::autogradNotImplementedFallback());
}

}  // namespace megatron_ext

// SPDX-License-Identifier: Apache-2.0
// The other translation unit: what handles tensors and operators.
#include "copies.cpp"
#include "factories.cpp"
#include "host_access.cpp"
#include "inference.cpp"
#include "module.cpp"
#include "operator_info.cpp"
#include "operators.cpp"
#include "tensors.cpp"

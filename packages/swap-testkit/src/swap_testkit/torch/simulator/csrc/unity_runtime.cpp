// SPDX-License-Identifier: Apache-2.0
// One of the two translation units: what needs few of torch's headers. Most of the time of a build
// goes into reading headers, so files are compiled together.
#include "checker.cpp"
#include "device_allocator.cpp"
#include "generator.cpp"
#include "guard.cpp"
#include "host_allocator.cpp"
#include "order.cpp"
#include "schedule.cpp"
#include "stream.cpp"

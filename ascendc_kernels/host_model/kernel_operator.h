// The header that kernels include: the modelled subset of Ascend C (see ../README.md). What is not modelled does not compile.
#pragma once
#include "cast.h"
#include "copy.h"
#include "cube.h"
#include "mask.h"
#include "pipe_queue.h"
#include "reduce.h"
#include "select.h"
#include "sync.h"
#include "system.h"
#include "vector.h"

// The declarations of the public headers that our kernels may use (the subset that ../../host_model models).
#pragma once
#include "kernel_tpipe.h"
#include "kernel_tensor.h"
#include "kernel_type.h"
#include "kernel_operator_block_sync_intf.h"
#include "kernel_operator_common_intf.h"
#include "kernel_operator_data_copy_intf.h"
#include "kernel_operator_determine_compute_sync_intf.h"
#include "kernel_operator_fixpipe_intf.h"
#include "kernel_operator_mm_intf.h"
#include "kernel_operator_sys_var_intf.h"
#include "kernel_operator_vec_binary_intf.h"
#include "kernel_operator_vec_binary_scalar_intf.h"
#include "kernel_operator_vec_brcb_intf.h"
#include "kernel_operator_vec_cmpsel_intf.h"
#include "kernel_operator_vec_duplicate_intf.h"
#include "kernel_operator_vec_gather_intf.h"
#include "kernel_operator_vec_reduce_intf.h"
#include "kernel_operator_vec_unary_intf.h"
#include "kernel_operator_vec_vconv_intf.h"

// Fixed at compile time by the device compiler.
#define KERNEL_TASK_TYPE_DEFAULT(type)
#define ASCEND_IS_AIC (::get_block_idx() == 0)
#define ASCEND_IS_AIV (::get_block_idx() != 0)

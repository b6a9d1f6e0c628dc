// libcublas: what torch asks of it.
#include "device.h"

#include <cublas_v2.h>

#include "matmul.h"

using namespace fake;

#define API(name) extern "C" cublasStatus_t name
#define DONE return CUBLAS_STATUS_SUCCESS

struct Handle { cudaStream_t stream = nullptr; cublasPointerMode_t pointers{}; cublasMath_t math{}; };

static cublasStatus_t multiply(const char* name, cublasHandle_t handle, const Product& product) {
  return fake_cuda_product(name, ((Handle*)handle)->stream, &product) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

API(cublasCreate_v2)(cublasHandle_t* made) {
  if (refused_in_capture("cublasCreate")) return CUBLAS_STATUS_ALLOC_FAILED;
  if (const char* mib = getenv("FAKE_CUDA_CUBLAS_MIB")) {
    Lock lock(mutex);
    if (!take((size_t)atof(mib) << 20)) return CUBLAS_STATUS_ALLOC_FAILED;
  }
  *made = (cublasHandle_t) new Handle;
  DONE;
}
API(cublasDestroy_v2)(cublasHandle_t) { DONE; }
API(cublasSetStream_v2)(cublasHandle_t handle, cudaStream_t stream) { ((Handle*)handle)->stream = stream; DONE; }
API(cublasSetWorkspace_v2)(cublasHandle_t handle, void* workspace, size_t) {
  static std::set<std::pair<void*, void*>> seen;
  if (seen.insert({handle, workspace}).second) count("new workspaces");
  DONE;
}
API(cublasGetMathMode)(cublasHandle_t handle, cublasMath_t* mode) { *mode = ((Handle*)handle)->math; DONE; }
API(cublasSetMathMode)(cublasHandle_t handle, cublasMath_t mode) { ((Handle*)handle)->math = mode; DONE; }
API(cublasGetPointerMode_v2)(cublasHandle_t handle, cublasPointerMode_t* mode) { *mode = ((Handle*)handle)->pointers; DONE; }
API(cublasSetPointerMode_v2)(cublasHandle_t handle, cublasPointerMode_t mode) { ((Handle*)handle)->pointers = mode; DONE; }
API(cublasSetSmCountTarget)(cublasHandle_t, int) { DONE; }
API(cublasGemmStridedBatchedEx)(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                                const void* alpha, const void* A, cudaDataType at, int lda, long long sa,
                                const void* B, cudaDataType bt, int ldb, long long sb, const void* beta,
                                void* C, cudaDataType ct, int ldc, long long sc, int batch, cublasComputeType_t compute, cublasGemmAlgo_t) {
  auto scale = [=](const void* at) { return compute == CUBLAS_COMPUTE_64F ? *(const double*)at : *(const float*)at; };
  Matrix c{C, ct, ldc, sc, false};
  return multiply("cublasGemmEx", handle,
                  {(size_t)m, (size_t)n, (size_t)k, batch, scale(alpha), scale(beta),
                   {A, at, lda, sa, ta != CUBLAS_OP_N}, {B, bt, ldb, sb, tb != CUBLAS_OP_N}, c, c, nullptr});
}
API(cublasGemmEx)(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const void* alpha,
                  const void* A, cudaDataType at, int lda, const void* B, cudaDataType bt, int ldb, const void* beta,
                  void* C, cudaDataType ct, int ldc, cublasComputeType_t compute, cublasGemmAlgo_t algorithm) {
  return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, A, at, lda, 0, B, bt, ldb, 0, beta, C, ct, ldc, 0, 1, compute, algorithm);
}
API(cublasSgemmStridedBatched)(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k,
                               const float* alpha, const float* A, int lda, long long sa, const float* B, int ldb, long long sb,
                               const float* beta, float* C, int ldc, long long sc, int batch) {
  return cublasGemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, A, CUDA_R_32F, lda, sa, B, CUDA_R_32F, ldb, sb, beta,
                                    C, CUDA_R_32F, ldc, sc, batch, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
}
API(cublasSgemm_v2)(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const float* alpha,
                    const float* A, int lda, const float* B, int ldb, const float* beta, float* C, int ldc) {
  return cublasSgemmStridedBatched(handle, ta, tb, m, n, k, alpha, A, lda, 0, B, ldb, 0, beta, C, ldc, 0, 1);
}
API(cublasDgemm_v2)(cublasHandle_t handle, cublasOperation_t ta, cublasOperation_t tb, int m, int n, int k, const double* alpha,
                    const double* A, int lda, const double* B, int ldb, const double* beta, double* C, int ldc) {
  return cublasGemmEx(handle, ta, tb, m, n, k, alpha, A, CUDA_R_64F, lda, B, CUDA_R_64F, ldb, beta, C, CUDA_R_64F, ldc,
                      CUBLAS_COMPUTE_64F, CUBLAS_GEMM_DEFAULT);
}
// y = alpha A x + beta y: a product whose B has one column, where the vectors are dense.
API(cublasSgemv_v2)(cublasHandle_t handle, cublasOperation_t transposed, int m, int n, const float* alpha, const float* A, int lda,
                    const float* x, int x_step, const float* beta, float* y, int y_step) {
  int rows = transposed ? n : m, inner = transposed ? m : n;
  return cublasSgemm_v2(handle, transposed, CUBLAS_OP_T, rows, 1, inner, alpha, A, lda, x, x_step, beta, y, y_step * rows);
}

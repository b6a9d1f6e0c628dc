// libcublasLt, and the matrix product that cuBLAS and cuBLASLt do.
#include "device.h"

#include <cublasLt.h>

#include "matmul.h"

using namespace fake;

namespace {
float from_bf16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // NaN
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;    // to nearest, ties to even
}
double read(const void* values, size_t at, int type) {
  switch (type) {
    case CUDA_R_32F: return ((const float*)values)[at];
    case CUDA_R_64F: return ((const double*)values)[at];
    case CUDA_R_16F: return (float)((const _Float16*)values)[at];
    case CUDA_R_16BF: return from_bf16(((const uint16_t*)values)[at]);
  }
  return 0;
}
void write(void* values, size_t at, int type, double value) {
  switch (type) {
    case CUDA_R_32F: ((float*)values)[at] = value; break;
    case CUDA_R_64F: ((double*)values)[at] = value; break;
    case CUDA_R_16F: ((_Float16*)values)[at] = (_Float16)(float)value; break;
    case CUDA_R_16BF: ((uint16_t*)values)[at] = to_bf16(value); break;
  }
}
size_t width(int type) { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }

template <class Sum>
void multiply(const Product& p, const char* a, const char* b, const char* c, char* d) {
  std::vector<Sum> a_columns(p.m * p.k), sums(p.m);
  for (size_t x = 0; x < p.k; x++)
    for (size_t i = 0; i < p.m; i++)
      a_columns[x * p.m + i] = read(a, p.a.transposed ? i * p.a.leading + x : x * p.a.leading + i, p.a.type);
  for (size_t j = 0; j < p.n; j++) {
    std::fill(sums.begin(), sums.end(), Sum(0));
    for (size_t x = 0; x < p.k; x++) {
      Sum factor = read(b, p.b.transposed ? x * p.b.leading + j : j * p.b.leading + x, p.b.type);
      const Sum* column = &a_columns[x * p.m];
      for (size_t i = 0; i < p.m; i++) sums[i] += column[i] * factor;
    }
    for (size_t i = 0; i < p.m; i++) {
      double value = p.alpha * sums[i];
      if (p.beta != 0) value += p.beta * read(c, j * p.c.leading + i, p.c.type);
      if (p.bias) value += read(p.bias, i, p.d.type);
      write(d, j * p.d.leading + i, p.d.type, value);
    }
  }
}

void require_device(const void* pointer, const char* which) {
  Lock lock(mutex);
  if (!on_device(pointer)) violation(std::string("a product's ") + which + " is not in device memory");
}
}  // namespace

extern "C" int fake_cuda_product(const char* name, void* stream, const Product* product) {
  static const bool computes = !getenv("FAKE_CUDA_NO_COMPUTE");
  Product p = *product;
  count("products");
  if (p.m && p.n && p.k) {
    require_device(p.a.values, "A");
    require_device(p.b.values, "B");
    require_device(p.d.values, "D");
  }
  return launch(name, stream_of(stream), [p] {
    for (int i = 0; computes && i < p.batch; i++) {
      auto at = [i](const Matrix& matrix) { return (char*)matrix.values + i * matrix.stride * width(matrix.type); };
      if (p.a.type == CUDA_R_64F) multiply<double>(p, at(p.a), at(p.b), at(p.c), at(p.d));
      else multiply<float>(p, at(p.a), at(p.b), at(p.c), at(p.d));
    }
  });
}

// --- cuBLASLt

struct Description { int scale_type; std::map<int, uint64_t> attributes; };
struct Layout { int type; uint64_t rows, columns; int64_t leading; int batch = 1; int64_t stride = 0; };

#define API(name) extern "C" cublasStatus_t name
#define DONE return CUBLAS_STATUS_SUCCESS

extern "C" size_t cublasLtGetVersion() { return 130101; }
API(cublasLtCreate)(cublasLtHandle_t* handle) { *handle = (cublasLtHandle_t)1; DONE; }
API(cublasLtMatmulDescCreate)(cublasLtMatmulDesc_t* made, cublasComputeType_t, cudaDataType_t scale) {
  *made = (cublasLtMatmulDesc_t) new Description{(int)scale};
  DONE;
}
API(cublasLtMatmulDescDestroy)(cublasLtMatmulDesc_t description) { delete (Description*)description; DONE; }
API(cublasLtMatmulDescSetAttribute)(cublasLtMatmulDesc_t description, cublasLtMatmulDescAttributes_t which, const void* from, size_t size) {
  uint64_t value = 0;
  memcpy(&value, from, std::min<size_t>(size, 8));
  ((Description*)description)->attributes[which] = value;
  DONE;
}
API(cublasLtMatrixLayoutCreate)(cublasLtMatrixLayout_t* made, cudaDataType_t type, uint64_t rows, uint64_t columns, int64_t leading) {
  *made = (cublasLtMatrixLayout_t) new Layout{type, rows, columns, leading};
  DONE;
}
API(cublasLtMatrixLayoutDestroy)(cublasLtMatrixLayout_t layout) { delete (Layout*)layout; DONE; }
API(cublasLtMatrixLayoutSetAttribute)(cublasLtMatrixLayout_t handle, cublasLtMatrixLayoutAttribute_t which, const void* from, size_t) {
  auto* layout = (Layout*)handle;
  if (which == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT) layout->batch = *(const int*)from;
  if (which == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET) layout->stride = *(const int64_t*)from;
  DONE;
}
API(cublasLtMatmulPreferenceCreate)(cublasLtMatmulPreference_t* made) { *made = (cublasLtMatmulPreference_t)malloc(64); DONE; }
API(cublasLtMatmulPreferenceDestroy)(cublasLtMatmulPreference_t preference) { free(preference); DONE; }
API(cublasLtMatmulPreferenceSetAttribute)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t, const void*, size_t) { DONE; }
API(cublasLtMatmulAlgoGetHeuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                    cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                    cublasLtMatmulHeuristicResult_t* found, int* count) {
  memset(found, 0, sizeof *found);
  *count = 1;
  DONE;
}
API(cublasLtMatmul)(cublasLtHandle_t, cublasLtMatmulDesc_t how, const void* alpha, const void* A, cublasLtMatrixLayout_t a_,
                    const void* B, cublasLtMatrixLayout_t b_, const void* beta, const void* C, cublasLtMatrixLayout_t c_,
                    void* D, cublasLtMatrixLayout_t d_, const cublasLtMatmulAlgo_t*, void*, size_t, cudaStream_t stream) {
  auto& attributes = ((Description*)how)->attributes;
  auto *a = (Layout*)a_, *b = (Layout*)b_, *c = (Layout*)c_, *d = (Layout*)d_;
  uint64_t epilogue = attributes[CUBLASLT_MATMUL_DESC_EPILOGUE];
  bool has_bias = epilogue == CUBLASLT_EPILOGUE_BIAS;
  if (attributes[CUBLASLT_MATMUL_DESC_POINTER_MODE]) violation("cuBLASLt takes a scale from the device");
  if (epilogue && epilogue != CUBLASLT_EPILOGUE_DEFAULT && !has_bias) violation("an epilogue that is not there");
  bool is_double = ((Description*)how)->scale_type == CUDA_R_64F;
  auto scale = [is_double](const void* at) { return is_double ? *(const double*)at : *(const float*)at; };
  bool a_transposed = attributes[CUBLASLT_MATMUL_DESC_TRANSA], b_transposed = attributes[CUBLASLT_MATMUL_DESC_TRANSB];
  Product product{d->rows, d->columns, a_transposed ? a->rows : a->columns, d->batch, scale(alpha), scale(beta),
                  {A, a->type, a->leading, a->stride, a_transposed}, {B, b->type, b->leading, b->stride, b_transposed},
                  {C, c->type, c->leading, c->stride, false}, {D, d->type, d->leading, d->stride, false},
                  has_bias ? (const void*)attributes[CUBLASLT_MATMUL_DESC_BIAS_POINTER] : nullptr};
  return fake_cuda_product("cublasLtMatmul", stream, &product) ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}

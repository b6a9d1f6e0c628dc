// D = alpha A B + beta C + bias: [m, n], column-major, `batch` times with strides in elements.
#pragma once
#include <cstddef>

struct Matrix {
  const void* values;
  int type;  // cudaDataType
  long long leading, stride;
  bool transposed;
};

struct Product {
  size_t m, n, k;
  int batch;
  double alpha, beta;
  Matrix a, b, c, d;
  const void* bias;
};

extern "C" int fake_cuda_product(const char* name, void* stream, const Product* product);

// What this build was made for, and by which compiler.

#define TF_EXPORT extern "C" __attribute__((visibility("default")))

// Names as in kernels/cpu/targets.py, told from what the compiler was allowed to use.
TF_EXPORT const char* transfuse_target() {
#if defined(__AMX_BF16__)
  return "amx_bf16";
#elif defined(__AVX512BF16__)
  return "avx512_bf16";
#elif defined(__AVX2__)
  return "avx2";
#else
  return "portable";
#endif
}

TF_EXPORT const char* transfuse_compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "g++ " __VERSION__;
#endif
}

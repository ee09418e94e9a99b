// One kernel of the convolutions as a function of a library; after emulated_cuda.hpp, which is compiled once for all.
#include SOURCE

// ------------------------------------------------------------------------------------------------- entry points

#if defined(FORWARD) || defined(INPUT_GRADIENT)
extern "C" int run(int gx, int gy, int gz, int count, int bytes, const u16* x, const void* side, const uint4* filters,
                   const float* bias, u16* result, u8* places, int batch) {
    return emulate(gx, gy, gz, count, bytes, [=] { NAME(x, side, filters, bias, result, places, batch); });
}
#elif defined(FIRST_FORWARD)
extern "C" int run(int gx, int gy, int gz, int count, int bytes, const u16* x, const uint4* filters, const float* bias,
                   u16* result, u8* places, int batch) {
    return emulate(gx, gy, gz, count, bytes, [=] { first_forward(x, filters, bias, result, places, batch); });
}
#elif defined(FILTER_GRADIENT)
extern "C" int run(int gx, int gy, int gz, int count, int bytes, const u16* x, const u16* gradient, const void* side,
                   float* partial, float* bias_partial, int batch) {
    return emulate(gx, gy, gz, count, bytes, [=] { filter_gradient(x, gradient, side, partial, bias_partial, batch); });
}
#elif defined(FIRST_GRADIENT)
extern "C" int run(int gx, int gy, int gz, int count, int bytes, const u16* x, const u16* gradient, const void* side,
                   float* partial, int batch) {
    return emulate(gx, gy, gz, count, bytes, [=] { first_gradient(x, gradient, side, partial, batch); });
}
#elif defined(ARRANGE)
extern "C" int run(int gx, int gy, int gz, int count, int bytes, const float* filters, u32* fragments, int number) {
    return emulate(gx, gy, gz, count, bytes, [=] { arrange(filters, fragments, number); });
}
#elif defined(REDUCE)
extern "C" int run(int gx, int gy, int gz, int count, int bytes, const float* partial, float* grad_filters, float* grad_bias,
                   int groups, int number) {
    return emulate(gx, gy, gz, count, bytes, [=] { reduce(partial, grad_filters, grad_bias, groups, number); });
}
#endif

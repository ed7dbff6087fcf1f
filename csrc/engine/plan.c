/* A plan: the checked request; the passes at their sizes; their chains, chosen (choose.c) and laid out (layout.c). */
#include "plan.h"

static size_t frames_of(const vm_request *r) { return VM_MAX(r->frames, 1); }

static float scale_of(const vm_request *r, int node) {
    return node == VM_NONE || r->backend->dtype != VM_F16 || !r->scale ? 1 : r->scale;
}

/* Returns: the number of frames after some halvings. The first frame is always alone. */
static size_t frames_at(const vm_request *r, int halvings) { return ((r->frames - 1) >> halvings) + 1; }

/* Returns: an order with rows and columns exchanged. */
static vm_order turned(vm_order order) {
    return order == VM_CHANNEL_ROW_COLUMN ? VM_CHANNEL_COLUMN_ROW : VM_CHANNEL_ROW_COLUMN;
}

static void set_shapes(vm_plan *plan, int i, const vm_arch *arch) {
    const vm_request *r = &plan->request;
    const vm_graph *g = plan->graph;
    const vm_node *n = &g->node[i];
    vm_pass *p = &plan->step[i].pass;
    *p = n->pass;
    p->turned = r->frames > 1 && r->width > r->height; /* rows of all frames are then as short as they can be */
    const size_t h = p->turned ? r->width : r->height, w = p->turned ? r->height : r->width;
    p->x = (vm_shape){p->x.c, h >> n->x_level, w >> n->x_level, frames_at(r, n->x_time)};
    p->y = (vm_shape){p->y.c, h >> n->y_level, w >> n->y_level, frames_at(r, n->y_time)};
    if (p->turned && p->kind == VM_PASS_MOVE) p->move.order = turned(p->move.order);
    p->x_scale = scale_of(r, n->x);
    p->y_scale = vm_plan_ends_with(plan, i) ? 1 : scale_of(r, i);
    if (n->x == VM_NONE) p->x_format = r->in;
    if (vm_plan_ends_with(plan, i)) p->y_format = r->out;
    if (r->unclamped) p->clamp.from = (uint32_t)p->y.c;
    if (n->x == VM_NONE && r->op == VM_DECODE && r->scaled) {
        p->affine = true;
        p->in_scale = 1 / arch->scaling_factor;
        p->in_shift = arch->shift_factor;
    }
    plan->step[i].last = i;
    if (n->x != VM_NONE) plan->step[n->x].last = i;
    if (n->add != VM_NONE) plan->step[n->add].last = i;
}

/* Returns: bytes of one batch item of the user's pixels: images, or latents (or moments) at the lowest level. */
static size_t pixel_bytes(const vm_request *r, vm_format format, size_t channels, size_t frames, size_t divisor) {
    const size_t item = format == VM_U8_NHWC ? 1 : format == VM_F32_NCHW ? 4 : 2;
    return VM_PRODUCT(channels, item, frames, r->height / divisor, r->width / divisor);
}

static vm_status check_request(const vm_model *m, const vm_request *r) {
    const size_t factor = vm_arch_factor(&m->arch), side[2] = {r->height, r->width};
    const vm_op op = r->op;
    if (!(m->parts & 1u << op))
        return vm_fail(VM_EINVAL, "%s: this VAE was loaded without its %s", op == VM_ENCODE ? "encode" : "decode",
                       op == VM_ENCODE ? "encoder" : "decoder");
    if (!r->batch) return vm_fail(VM_EINVAL, VM_EXPECTED("batch", "1 or more", "0"));
    for (int i = 0; i < 2; i++) {
        const char *const name = i ? "width" : "height";
        if (!side[i] || side[i] % factor)
            return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "a positive multiple of %zu", "%zu"), name, factor, side[i]);
        if (side[i] > VM_MAX_SIDE)
            return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "at most %d", "%zu"), name, VM_MAX_SIDE, side[i]);
    }
    for (int i = 0; i < 2 && m->arch.half[op].mirrored; i++)
        if (side[i] == factor)
            return vm_fail(VM_EINVAL, VM_EXPECTED("%s", "%zu or more, to mirror latents", "%zu"),
                           i ? "width" : "height", 2 * factor, side[i]);
    const size_t apart = (size_t)1 << vm_arch_halvings(&m->arch);
    if (r->frames > 1 && !m->arch.videos)
        return vm_fail(VM_EINVAL, VM_EXPECTED("frames", "1: this VAE was loaded for images", "%zu"), r->frames);
    if (r->frames > VM_MAX_SIDE || (r->frames > 1 && (r->frames - 1) % apart))
        return vm_fail(VM_EINVAL, VM_EXPECTED("frames", "1 more than a multiple of %zu, at most %d", "%zu"), apart,
                       VM_MAX_SIDE, r->frames);
    if (r->scaled && !m->arch.scaling_known)
        return vm_fail(VM_EINVAL,
                       "scaled: the weights do not tell the scaling factor (sd15 and sdxl have the same "
                       "tensors); load with model= or config=");
    return VM_OK;
}

static vm_status check_fits(const vm_request *r, size_t bytes) {
    if (bytes <= PTRDIFF_MAX) return VM_OK;
    return vm_fail(VM_EOVERFLOW,
                   VM_EXPECTED("batch", "a run whose bytes can be addressed", "%zu of %zux%zu with %u threads"),
                   r->batch, r->height, r->width, r->limits.threads);
}

static vm_status build(const vm_model *m, vm_plan *plan) {
    vm_request *r = &plan->request;
    const size_t factor = vm_arch_factor(&m->arch), latent = m->arch.latent_channels;
    const bool encode = r->op == VM_ENCODE;
    vm_status s;
    plan->staged = r->host_arrays && !r->backend->device->addressable;
    r->own_output &=
        !plan->staged; /* a staged array has its place in the arena; the host's copy is not part of the plan */
    const size_t coded = frames_at(r, (int)vm_arch_halvings(&m->arch)); /* frames of latents */
    plan->in_bytes =
        pixel_bytes(r, r->in, encode ? m->arch.in_channels : latent, encode ? r->frames : coded, encode ? 1 : factor);
    plan->out_bytes = pixel_bytes(r, r->out, encode ? vm_arch_encoded(&m->arch) : m->arch.out_channels,
                                  encode ? coded : r->frames, encode ? factor : 1);
    for (int i = 0; i < (int)plan->steps; i++) { /* before asking a backend about passes of such sizes */
        set_shapes(plan, i, &m->arch);
        if ((s = check_fits(r, VM_PRODUCT(vm_plan_row_bytes(plan, i), plan->step[i].pass.y.h, 8)))) return s;
    }
    s = vm_plan_choose(m, plan);
    if (s && s != VM_ELIMIT) return s;
    const size_t in_all = vm_sum(plan->reserved, VM_PRODUCT(vm_sum(plan->in_bytes, plan->out_bytes), r->batch));
    const vm_status fits = check_fits(r, in_all); /* checks the least plan too: a limit's refusal names its bytes */
    return fits ? fits : s;
}

vm_status vm_plan_new(const vm_model *m, const vm_request *request, vm_plan **out) {
    *out = NULL;
    vm_status s = check_request(m, request);
    if (s) return s;
    const vm_graph *g = vm_passes_of(m, request->op, request->frames);
    size_t bytes = 0;
    vm_put_bytes(&bytes, sizeof(vm_plan), VM_ALIGN);
    const size_t step = vm_put_bytes(&bytes, g->nodes * sizeof(vm_step), VM_ALIGN);
    const size_t chain = vm_put_bytes(&bytes, g->nodes * sizeof(vm_chain), VM_ALIGN);
    const size_t piece = vm_put_bytes(&bytes, (5 * g->nodes + 2) * sizeof(vm_piece), VM_ALIGN);
    char *block;
    if ((s = vm_mem_reserve(m->host, bytes, (void **)&block))) return s;
    vm_plan *plan = (vm_plan *)block;
    *plan = (vm_plan){.request = *request,
                      .graph = g,
                      .steps = g->nodes,
                      .step = (vm_step *)(block + step),
                      .chain = (vm_chain *)(block + chain),
                      .piece = (vm_piece *)(block + piece),
                      .pool_bytes = vm_pool_bytes(request->limits.threads),
                      .plan_bytes = bytes};
    plan->request.frames = frames_of(request);
    plan->own_bytes = m->mem == m->host ? plan->plan_bytes + plan->pool_bytes : 0;
    if ((s = build(m, plan)) && s != VM_ELIMIT)
        vm_plan_free(m, plan);
    else
        *out = plan;
    return s;
}

/* Returns: whether the plan answers an equal request. */
static bool serves(const vm_plan *plan, const vm_request *b) {
    const vm_request *a = &plan->request;
    return a->op == b->op && a->backend == b->backend && a->limits.threads == b->limits.threads &&
           a->height == b->height && a->width == b->width && a->batch == b->batch && a->frames == frames_of(b) &&
           a->in == b->in && a->out == b->out && a->host_arrays == b->host_arrays &&
           a->own_output == (b->own_output && !plan->staged) && a->scaled == b->scaled &&
           a->unclamped == b->unclamped && a->scale == b->scale && a->memory_limit == b->memory_limit;
}

vm_status vm_plan_for_run(vm_model *m, const vm_request *request, vm_plan **out) {
    const bool again = m->plan && serves(m->plan, request);
    const vm_status s = again ? VM_OK : vm_plan_new(m, request, out);
    if (s) return s; /* as before this call */
    if (again)
        *out = m->plan;
    else
        vm_plan_free(m, m->plan);
    m->plan = NULL;
    return VM_OK;
}

void vm_plan_keep(vm_model *m, vm_plan *plan) {
    if (m->host == m->mem)
        vm_plan_free(m, plan);
    else
        m->plan = plan;
}

void vm_plan_free(const vm_model *m, vm_plan *plan) {
    if (plan) vm_mem_unreserve(m->host, plan, plan->plan_bytes);
}

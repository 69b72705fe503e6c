//! Ranks that stay away, come late, send nonsense or are launched wrongly: the exchange waits as long as it
//! must, and ends with an error that names whose fault it is.

use half::bf16;
use keyway_kernels::cuda::peer::Layout;
use keyway_kernels::cuda::{Kernel, Launch, Slice};
use keyway_kernels::fabric::{Cause, FabricError, Phase};
use keyway_kernels::moe::Placement;

use super::{DEADLINE, Group, LATE, Round};
use crate::cases::Lab;

/// Messages that come while a rank waits for them are taken. The emulator alone can have something happen in
/// the middle of a launch.
pub(super) fn messages_that_come_late(lab: &mut Lab<'_>) -> Result<(), String> {
    if lab.device.generation() != "emulated" {
        return Ok(());
    }
    let layout = Layout { ranks: 2, held: 4, tokens: 3, top: 2, width: 16 };
    let group = Group::new(lab, layout, Placement::even(8, 2), 1)?;
    let round = Round::new(&layout, 4, &[3, 2], |rank, slot| (slot * 3 + rank) % 8);
    let [zero, one] = &group.members[..] else { return Err("two members".into()) };
    let sent = [round.upload(lab, &layout, zero)?, round.upload(lab, &layout, one)?];
    for (member, tokens) in group.members.iter().zip(&sent) {
        lab.launch(member.peers.dispatch_send(tokens))?;
    }
    // The first round's flags of rank 1 in the mailbox of rank 0, of either phase: taken away, and to come
    // later.
    let buffer = group.mailboxes.buffer().ok_or("mailboxes of one device")?;
    let delay = |lab: &mut Lab<'_>, phase: u64| {
        let flag = Slice::<u32>::new(buffer, 512 + ((phase * 2 + 1) * 32 + 1) * 4, 1);
        let arrived = lab.download(flag)?;
        lab.same("a flag", &arrived, &[1])?;
        lab.device.overwrite(flag, &[0u32]).map_err(|e| e.to_string())?;
        lab.launch([Launch {
            kernel: Kernel::write_later,
            grid: [1; 3],
            cluster: 1,
            threads: 1,
            shared_bytes: 0,
            arguments: vec![flag.into(), 1u32.into(), 300u32.into()],
        }])
    };
    delay(lab, 0)?;
    for member in [zero, one] {
        lab.launch([member.peers.dispatch_receive(&member.arrivals)])?;
        group.experts(lab, member)?;
        lab.launch([member.peers.combine_send(member.outputs)])?;
    }
    delay(lab, 1)?;
    group.sum(lab, zero, &sent[0], &round)?;
    group.sum(lab, one, &sent[1], &round)?;
    group.free(lab);
    Ok(())
}

/// Of a rank that stopped the last one here has the tokens, the first has not, and waits. Who misses both
/// names the one that stopped.
pub(super) fn a_rank_that_waits_is_not_named(lab: &mut Lab<'_>) -> Result<(), String> {
    let layout = Layout { ranks: 3, held: 3, tokens: 4, top: 2, width: 24 };
    let group = Group::new(lab, layout, Placement::even(8, 3), 1)?;
    let round = Round::new(&layout, 1, &[4, 2, 3], |rank, slot| (slot * 3 + rank) % 8);
    group.round(lab, &round)?;
    let [_, one, _] = &group.members[..] else { return Err("three members".into()) };
    let mut tokens = Vec::new();
    for member in &group.members {
        tokens.push(round.upload(lab, &layout, member)?);
        lab.launch(member.peers.dispatch_send(&tokens[tokens.len() - 1]))?;
    }
    // The second round's flag of rank 2 never came to the mailbox of rank 0.
    let buffer = group.mailboxes.buffer().ok_or("mailboxes of one device")?;
    let flag = Slice::<u32>::new(buffer, 512 + 2 * 4, 1);
    let arrived = lab.download(flag)?;
    lab.same("a flag", &arrived, &[2])?;
    lab.device.overwrite(flag, &[0u32]).map_err(|e| e.to_string())?;
    lab.launch([one.peers.dispatch_receive(&one.arrivals)])?;
    group.experts(lab, one)?;
    let out = lab.poisoned(tokens[1].x.len)?;
    lab.launch([one.peers.combine_send(one.outputs), one.peers.combine_receive(&tokens[1], None, out)])?;
    let cause = Cause::Deadline(DEADLINE);
    let expected = Some(FabricError { rank: 2, exchange: 4, phase: Phase::Combine, layer: None, cause });
    let fault = group.fault(lab, 1)?;
    if fault != expected {
        return Err(format!("{fault:?} instead of {expected:?}"));
    }
    group.free(lab);
    Ok(())
}

/// A rank that sends nothing is named by all others at the deadline, in either phase; the group stays failed
/// until it is reset.
pub(super) fn a_rank_that_stays_away(lab: &mut Lab<'_>) -> Result<(), String> {
    let layout = Layout { ranks: 3, held: 3, tokens: 4, top: 2, width: 24 };
    let group = Group::new(lab, layout, Placement::even(8, 3), 1)?;
    let round = Round::new(&layout, 1, &[4, 2, 3], |rank, slot| (slot * 3 + rank) % 8);
    let [zero, one, two] = &group.members[..] else { return Err("three members".into()) };
    let failed = |lab: &mut Lab<'_>, rank, exchange, phase| -> Result<(), String> {
        let cause = Cause::Deadline(DEADLINE);
        let expected = Some(FabricError { rank, exchange, phase, layer: None, cause });
        for member in [0, 2] {
            let fault = group.fault(lab, member)?;
            if fault != expected {
                return Err(format!("member {member} found {fault:?} instead of {expected:?}"));
            }
        }
        Ok(())
    };
    // After some rounds, so that places are used again: what they held before must not do.
    for started in [1, LATE] {
        group.reset(lab, started)?;
        for _ in 0..3 {
            group.round(lab, &round)?;
        }
        let exchange = if started == 1 { 7 } else { 3 };
        let mut tokens = Vec::new();
        for member in [zero, two] {
            tokens.push(round.upload(lab, &layout, member)?);
            lab.launch(member.peers.dispatch_send(&tokens[tokens.len() - 1]))?;
        }
        lab.launch([zero.peers.dispatch_receive(&zero.arrivals)])?;
        // Who comes late has been told, so that rank 2 finds the same fault, and not rank 0 at fault a step
        // later.
        let late = round.upload(lab, &layout, one)?;
        lab.launch(one.peers.dispatch_send(&late))?;
        lab.launch([two.peers.dispatch_receive(&two.arrivals)])?;
        failed(lab, 1, exchange, Phase::Dispatch)?;
        // Products that follow find no work.
        let items = lab.download(zero.arrivals.item_counts)?;
        lab.same("items of a group that failed", &items, &[0])?;
        // Nothing is done any more, and the first fault stays.
        let out: Slice<bf16> = lab.poisoned(tokens[0].x.len)?;
        lab.launch([
            zero.peers.combine_send(zero.outputs),
            zero.peers.combine_receive(&tokens[0], None, out),
        ])?;
        for _ in 0..3 {
            lab.launch(zero.peers.dispatch_send(&tokens[0]))?;
        }
        let out = lab.download(out)?;
        lab.same("sums of a group that failed", &out, &vec![bf16::from_bits(0xffff); out.len()])?;
        failed(lab, 1, exchange, Phase::Dispatch)?;
    }
    group.reset(lab, 9)?;
    group.round(lab, &round)?;
    // The same on the way back: rank 0 has sent its outputs and waits for those of rank 1.
    let sent = [
        round.upload(lab, &layout, zero)?,
        round.upload(lab, &layout, one)?,
        round.upload(lab, &layout, two)?,
    ];
    for (member, tokens) in group.members.iter().zip(&sent) {
        lab.launch(member.peers.dispatch_send(tokens))?;
    }
    for member in &group.members {
        lab.launch([member.peers.dispatch_receive(&member.arrivals)])?;
        group.experts(lab, member)?;
    }
    let out = lab.poisoned(sent[0].x.len)?;
    lab.launch([two.peers.combine_send(two.outputs), zero.peers.combine_send(zero.outputs)])?;
    lab.launch([
        zero.peers.combine_receive(&sent[0], None, out),
        two.peers.combine_receive(&sent[2], None, out),
    ])?;
    failed(lab, 1, 20, Phase::Combine)?;
    group.reset(lab, 2)?;
    group.round(lab, &round)?;
    group.free(lab);
    Ok(())
}

/// A message that makes no sense ends the group and names its sender, and nothing is written where it says.
pub(super) fn nonsense(lab: &mut Lab<'_>) -> Result<(), String> {
    let layout = Layout { ranks: 2, held: 4, tokens: 2, top: 2, width: 8 };
    let at = layout.message_at(1, 1);
    // More rows than slots; fewer than of the experts before; a token and a slot that cannot be.
    let words = [(at + 12, 5), (at + 8, 0), (at + layout.rows_at() + 8, 2), (at + layout.rows_at() + 12, 4)];
    for (byte, word) in words {
        let group = Group::new(lab, layout, Placement::even(8, 2), 2)?;
        let member = &group.members[0];
        let round = Round::new(&layout, 1, &[2, 2], |_, slot| slot % 2);
        let tokens = round.upload(lab, &layout, member)?;
        lab.launch(member.peers.dispatch_send(&tokens))?;
        let buffer = group.mailboxes.buffer().ok_or("mailboxes of one device")?;
        lab.device.overwrite(Slice::new(buffer, byte as u64, 1), &[word]).map_err(|e| e.to_string())?;
        lab.launch([member.peers.dispatch_receive(&member.arrivals)])?;
        lab.launch([member.peers.combine_send(member.outputs)])?;
        let fault = group.fault(lab, 0)?.ok_or(format!("word {word} at {byte} went unseen"))?;
        let expected = Cause::Protocol("a message that makes no sense");
        if (fault.rank, fault.exchange, &fault.cause) != (1, 1, &expected) {
            return Err(format!("word {word} at {byte} is {fault}"));
        }
        group.free(lab);
    }
    Ok(())
}

/// A rank's own mistakes end the group too, and name it.
pub(super) fn misuse(lab: &mut Lab<'_>) -> Result<(), String> {
    let layout = Layout { ranks: 2, held: 4, tokens: 2, top: 2, width: 8 };
    let group = Group::new(lab, layout, Placement::even(8, 2), 2)?;
    let member = &group.members[0];
    let good = Round::new(&layout, 1, &[2, 2], |rank, slot| slot + rank);
    let mut too_many = good.clone();
    too_many.counts[1] = 3;
    let mut unknown = good.clone();
    unknown.ids[6] = 8;
    for (round, sends) in [(&good, 3), (&too_many, 1), (&unknown, 1)] {
        group.reset(lab, 1)?;
        let tokens = round.upload(lab, &layout, member)?;
        for _ in 0..sends {
            if let Some(early) = group.fault(lab, 0)? {
                return Err(format!("a fault before there was one: {early}"));
            }
            lab.launch(member.peers.dispatch_send(&tokens))?;
        }
        let fault = group.fault(lab, 0)?.ok_or("misuse went unseen")?;
        let named = if sends == 3 { fault.rank < 2 } else { fault.rank == 1 };
        if !named || !matches!(fault.cause, Cause::Protocol(_)) {
            return Err(format!("misuse of rank 1 is {fault}"));
        }
        group.reset(lab, 1)?;
        group.round(lab, &good)?;
    }
    group.free(lab);
    Ok(())
}
